#include "holmes/transport/path_watch.hpp"

#include <linux/tcp.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/core/random.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {
namespace {

// Of the time between two looks at most: what lasted because the peer did not read tells nothing.
constexpr double most_waiting_share = 0.1;
constexpr double us_per_s = 1e6;
// With so few packets under way bbr measures the round trip, for 0.2 s in 10: it holds back by itself.
constexpr unsigned probing_window = 4;
// One look at which nothing was left unsent is a sender that was late.
constexpr int most_looks_without = 1;
constexpr std::chrono::milliseconds carried_interval{50};
// How long a process leaves it to another one beside it to tell a change, and says that it has.
constexpr std::chrono::milliseconds others_tell_within{500};
constexpr std::chrono::seconds says_so_for{3};

std::string megabits(double bytes_per_s) { return std::to_string(std::lround(bytes_per_s * 8e-6)); }

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

bool differ(double one, double other) { return one > PathRate::change * other || other > PathRate::change * one; }

// The same in every process: FNV-1a.
std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  return hash;
}

std::optional<PathSample> sample_of(int fd) {
  const auto info = tcp_info_of(fd);
  if (!info || info->tcpi_min_rtt == ~0U) return std::nullopt;
  return PathSample{.sent_bytes = info->tcpi_bytes_sent - info->tcpi_bytes_retrans,
                    .acknowledged_bytes = info->tcpi_bytes_acked,
                    .arrived_bytes = std::uint64_t{info->tcpi_delivered} * info->tcpi_snd_mss,
                    .awaited_us = info->tcpi_rwnd_limited,
                    .round_trip = std::chrono::microseconds(info->tcpi_rtt),
                    .shortest = std::chrono::microseconds(info->tcpi_min_rtt),
                    .has_unsent = info->tcpi_notsent_bytes > 0 && info->tcpi_snd_cwnd > probing_window};
}

// Of the process; a forked child has none of its parent's connections.
struct Paths {
  const std::uint64_t epoch = fork_epoch();
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, std::weak_ptr<Path>> by_name;
};

}  // namespace

std::optional<double> PathRate::observe(Clock::time_point now, double bytes, Duration elapsed, Duration round_trip) {
  if (bytes <= 0) {
    silent_s_ += seconds(elapsed);
    return std::nullopt;
  }
  const double silent_s = std::exchange(silent_s_, 0);
  if (silent_s >= seconds(interruption)) {  // what comes now waited meanwhile
    window_ = {};
    previous_.reset();
    return std::nullopt;
  }
  if (window_.seconds == 0) window_.begun = now - elapsed;
  window_.bytes += bytes;
  window_.seconds += seconds(elapsed) + silent_s;
  const double least_s = std::max(seconds(least_time), least_round_trips * seconds(round_trip));
  if (now - window_.begun < window || window_.seconds < least_s) return std::nullopt;
  return judge(std::exchange(window_, {}));
}

std::optional<double> PathRate::judge(const Sum& latest) {
  const auto previous = std::exchange(previous_, latest);
  if (!previous) return std::nullopt;
  const double both = (previous->bytes + latest.bytes) / (previous->seconds + latest.seconds);
  if (!told_ && !differ(latest.rate(), previous->rate())) told_ = both;
  if (!told_) return std::nullopt;
  rate_ = latest.rate();
  const auto is_less = [&](const Sum& one) { return change * one.rate() < *told_; };
  const auto is_more = [&](const Sum& one) { return one.rate() > change * *told_; };
  const bool is_other = is_less(latest) ? is_less(*previous) : is_more(latest) && is_more(*previous);
  return is_other ? std::exchange(told_, both) : std::nullopt;
}

PathShare::Arrived PathShare::observe(Clock::time_point now, const PathSample& sample) {
  const auto elapsed = now - std::exchange(looked_at_, now);
  const PathSample before = std::exchange(last_, sample);
  const bool is_new = elapsed > longest_interval;
  if (!sample.has_unsent) {
    ++looks_without_;
  } else {
    if (is_new || looks_without_ > most_looks_without) {
      newest_ = (newest_ + 1) % limited_.size();
      limited_[newest_].from = is_new ? sample.acknowledged_bytes : before.sent_bytes;
    }
    limited_[newest_].to = sample.sent_bytes;
    looks_without_ = 0;
  }
  if (is_new) return {};
  const auto waited_us = static_cast<double>(sample.awaited_us - before.awaited_us);
  return {.bytes = static_cast<double>(sample.arrived_bytes - before.arrived_bytes),
          .is_limit = is_within_range(before.acknowledged_bytes, sample.acknowledged_bytes) &&
                      waited_us <= most_waiting_share * us_per_s * seconds(elapsed)};
}

// What is before the first of them, or at it, was not held up by others; behind the last one nothing is known.
bool PathShare::is_within_range(std::uint64_t from, std::uint64_t to) const {
  return std::ranges::any_of(limited_, [&](const Range& range) { return range.from < from && to < range.to; });
}

std::shared_ptr<Path> Path::of(const std::string& interface, const std::string& place) {
  Paths& all = own_of_process<Paths>();
  const std::lock_guard lock(all.mutex);
  auto& known = all.by_name[{interface, place}];
  auto path = known.lock();
  if (!path) known = path = std::make_shared<Path>(interface, place);
  return path;
}

Path::Path(const std::string& interface, const std::string& place)
    : name_("the path to " + place + " over NIC " + interface),
      key_(hash_of(place)),
      teller_(random_number()),
      uplink_(Uplink::of(interface)) {}

void Path::add(PathWatch& watch) {
  const std::lock_guard lock(mutex_);
  watches_.push_back(&watch);
}

void Path::remove(PathWatch& watch) {
  const std::lock_guard lock(mutex_);
  std::erase(watches_, &watch);
}

void Path::forget() {
  const std::lock_guard lock(mutex_);
  rate_.forget();
}

void Path::look(Clock::time_point now, const PathWatch& asked_by) {
  if (now.time_since_epoch().count() < next_look_.load(std::memory_order_relaxed)) return;
  uplink_->hear(now);
  const Look found = look_at_all(now, uplink_->beside(key_, teller_, now));
  if (found.carried) uplink_->tell(*found.carried);
  if (found.change) where_memory_allows([&] { tell(*found.change, asked_by); });
}

Path::Look Path::look_at_all(Clock::time_point now, const Beside& beside) {
  const std::lock_guard lock(mutex_);
  const auto elapsed = now - looked_at_;
  if (elapsed < look_interval) return {};
  looked_at_ = now;
  next_look_.store((now + look_interval).time_since_epoch().count(), std::memory_order_relaxed);
  double bytes = 0;
  bool is_limit = false;
  std::chrono::microseconds round_trip{}, shortest{};
  for (PathWatch* watch : watches_) {
    watch->is_limit_ = false;
    const Clock::time_point used_at{Clock::duration(watch->used_at_.load(std::memory_order_relaxed))};
    if (now - used_at > PathShare::longest_interval) continue;
    const auto sample = watch->ask_();
    if (!sample) continue;
    const auto arrived = watch->share_.observe(now, *sample);
    bytes += arrived.bytes;
    if (!arrived.is_limit) continue;
    is_limit = watch->is_limit_ = true;
    round_trip = std::max(round_trip, sample->round_trip);
    shortest = std::max(shortest, sample->shortest);
  }
  Look found;
  if (is_limit) {
    const double all_bytes = bytes > 0 ? bytes + beside.bytes_per_s * seconds(elapsed) : 0;
    const auto before = rate_.observe(now, all_bytes, elapsed, shortest);
    if (before) {
      changes_.store(changes() + 1, std::memory_order_relaxed);
      untold_ = Change{*before, *rate_.bytes_per_s(), round_trip, 1 + beside.processes,
                       beside.one_may_tell ? now + others_tell_within : now};
    }
    const auto rate = rate_.bytes_per_s();
    for (PathWatch* watch : watches_) {
      if (!watch->is_limit_) continue;
      if (rate) watch->bytes_per_s_.store(static_cast<std::uint64_t>(*rate), std::memory_order_relaxed);
      watch->changes_.store(changes() - watch->changes_before_, std::memory_order_relaxed);
    }
  }
  heed_others(now, beside);
  if (untold_ && now >= untold_->tell_at) {
    found.change = std::exchange(untold_, {});
    told_at_ = now;
  }
  found.carried = what_is_carried(now, bytes, is_limit);
  return found;
}

// What one of them has told, this one does not tell again, now or a little later.
void Path::heed_others(Clock::time_point now, const Beside& beside) {
  if (!beside.one_has_told) return;
  const bool is_new = now - std::exchange(others_told_at_, now) > says_so_for;
  if (std::exchange(untold_, {}) || !is_new || now - told_at_ <= says_so_for) return;
  changes_.store(changes() + 1, std::memory_order_relaxed);
  rate_.forget();
}

// For the processes beside this one.
std::optional<Carried> Path::what_is_carried(Clock::time_point now, double bytes, bool is_limit) {
  carried_bytes_ += bytes;
  carried_at_limit_ |= is_limit;
  const auto since = now - carried_since_;
  if (since < carried_interval && told_at_ != now) return std::nullopt;
  const Carried carried{.path = key_,
                        .teller = teller_,
                        .bytes_per_s = carried_bytes_ / seconds(since),
                        .is_limit = carried_at_limit_,
                        .has_told = now - told_at_ < says_so_for};
  carried_bytes_ = 0;
  carried_at_limit_ = false;
  carried_since_ = now;
  return carried.bytes_per_s > 0 && since < Uplink::carried_lease ? std::optional(carried) : std::nullopt;
}

void Path::tell(const Change& change, const PathWatch& asked_by) const {
  if (!log_enabled(LogLevel::info)) return;
  const std::string of = change.processes > 1 ? "; of " + std::to_string(change.processes) + " processes" : "";
  log(LogLevel::info, asked_by.own_rank_,
      name_ + " carries " + megabits(change.now_bytes_per_s) + " Mbit/s, before " + megabits(change.before) +
          "; round trip " + std::to_string(std::lround(static_cast<double>(change.round_trip.count()) * 1e-3)) + " ms" +
          of);
}

PathWatch::PathWatch(std::shared_ptr<Path> path, int own_rank, Ask ask)
    : path_(std::move(path)), own_rank_(own_rank), ask_(std::move(ask)), changes_before_(path_->changes()) {
  path_->add(*this);
}

PathWatch::PathWatch(std::shared_ptr<Path> path, int own_rank, int fd)
    : PathWatch(std::move(path), own_rank, [fd] { return sample_of(fd); }) {}

}  // namespace holmes
