#include "holmes/record/link_use.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "holmes/core/fork.hpp"

namespace holmes {

struct Link {
  LinkSample latest;
  LinkHistory history;
};

namespace {

constexpr std::chrono::milliseconds look_interval{100};
// Of the time that a look takes at least.
constexpr int most_share_of_time = 200;
// A long job may see any number of hosts.
constexpr std::size_t kept_links = 64;

struct Links {
  using Name = std::tuple<std::string, std::string, std::string>;

  const std::uint64_t epoch = fork_epoch();
  std::mutex mutex;
  std::vector<LinkUse*> uses;
  std::map<Name, std::shared_ptr<Link>> by_name;
};

Links& links() { return own_of_process<Links>(); }

// Room for another one: those that nobody uses any more go first, the longest unused one of them.
void make_room(Links& own) {
  if (own.by_name.size() < kept_links) return;
  auto oldest = own.by_name.end();
  for (auto one = own.by_name.begin(); one != own.by_name.end(); ++one)
    if (one->second.use_count() == 1 &&
        (oldest == own.by_name.end() || one->second->latest.at < oldest->second->latest.at))
      oldest = one;
  if (oldest != own.by_name.end()) own.by_name.erase(oldest);
}

}  // namespace

void StallWatch::look(Clock::time_point now, bool is_under_way, std::uint64_t delivered, Duration round_trip) {
  const auto before = std::exchange(looked_at_, now);
  const bool was_under_way = std::exchange(was_under_way_, is_under_way);
  if (std::exchange(delivered_, delivered) != delivered || !is_under_way || !was_under_way) {
    moved_at_ = now;
    is_stalled_ = false;
    return;
  }
  if (now - moved_at_ < std::max<Duration>(least, least_round_trips * round_trip)) return;
  const auto more = now - (is_stalled_ ? before : moved_at_);
  if (!std::exchange(is_stalled_, true)) stalls_.fetch_add(1, std::memory_order_relaxed);
  stalled_ns_.fetch_add(std::chrono::nanoseconds(more).count(), std::memory_order_relaxed);
}

void LinkHistory::add(const LinkSample& sample) {
  const auto is_same = [&](const LinkSample& other) {
    return other.sent_bytes == sample.sent_bytes && other.stalled == sample.stalled &&
           other.round_trip == sample.round_trip;
  };
  const std::size_t count = samples_.size();
  if (count >= 2 && is_same(samples_[count - 1]) && is_same(samples_[count - 2])) {  // nothing happens
    samples_.back().at = sample.at;
    return;
  }
  if (count == most) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count; ++i)
      if (i >= most / 2 || i % 2 == 0) samples_[kept++] = samples_[i];
    samples_.resize(kept);
  }
  samples_.push_back(sample);
}

LinkUse::LinkUse(std::shared_ptr<Link> link, Ask ask) : link_(std::move(link)), ask_(std::move(ask)) {
  Links& own = links();
  const std::lock_guard lock(own.mutex);
  own.uses.push_back(this);
}

LinkUse::~LinkUse() {
  Links& own = links();
  const std::lock_guard lock(own.mutex);
  if (std::erase(own.uses, this) == 0) return;
  look(Clock::now());
  link_->history.add(link_->latest);
}

void LinkUse::look(Clock::time_point now) {
  const auto sample = ask_();
  if (!sample) return;
  stalls_.look(now, sample->is_under_way, sample->delivered, sample->round_trip);
  LinkSample& latest = link_->latest;
  const std::uint64_t before = std::exchange(sent_bytes_, sample->sent_bytes);
  latest.at = now;
  latest.sent_bytes += sent_bytes_ - before;
  if (sample->is_under_way || sent_bytes_ != before)
    latest.round_trip = std::max(latest.round_trip, sample->round_trip);
  if (stalls_.is_stalled()) ++latest.stalled;
}

std::shared_ptr<Link> link_between(const std::string& interface, const std::string& from, const std::string& to) {
  Links& own = links();
  const std::lock_guard lock(own.mutex);
  const Links::Name name{interface, from, to};
  if (const auto known = own.by_name.find(name); known != own.by_name.end()) return known->second;
  make_room(own);
  return own.by_name[name] = std::make_shared<Link>();
}

Clock::time_point look_at_links() {
  Links& own = links();
  const std::lock_guard lock(own.mutex);
  if (own.uses.empty()) return Clock::time_point::max();
  const auto now = Clock::now();
  for (const auto& [name, link] : own.by_name) link->latest = {.at = now, .sent_bytes = link->latest.sent_bytes};
  for (LinkUse* use : own.uses) use->look(now);
  for (const auto& [name, link] : own.by_name) link->history.add(link->latest);
  const auto took = Clock::now() - now;
  return now + std::max<Duration>(look_interval, most_share_of_time * took);
}

std::vector<LinkRecord> link_records() {
  Links& own = links();
  const std::lock_guard lock(own.mutex);
  std::vector<LinkRecord> records;
  for (const auto& [name, link] : own.by_name) {
    const auto& [interface, from, to] = name;
    records.push_back({interface, from, to, link->history.samples()});
  }
  return records;
}

}  // namespace holmes
