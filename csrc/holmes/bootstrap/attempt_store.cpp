#include "holmes/bootstrap/attempt_store.hpp"

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/bootstrap/secret.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/interrupt.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t attempt_token_bytes = 16;
constexpr Duration token_interval = 20ms;

// Which ones the ranks of this process have joined: the last few, as one that is over is soon followed by another.
class Joined {
public:
  // False where it has been joined before.
  bool add(const std::string& token, int rank) {
    constexpr std::size_t most = 4096;
    const std::lock_guard lock(mutex_);
    std::pair<std::string, int> one{token, rank};
    if (std::ranges::find(last_, one) != last_.end()) return false;
    last_.push_back(std::move(one));
    if (last_.size() > most) last_.pop_front();
    return true;
  }

private:
  std::mutex mutex_;
  std::deque<std::pair<std::string, int>> last_;
};

Joined& joined() {
  static auto& one = *new Joined;
  return one;
}

}  // namespace

AttemptStore::AttemptStore(std::shared_ptr<Store> base, std::string name, int rank, Duration patience)
    : base_(std::move(base)),
      name_(std::move(name)),
      key_(name_ + "/attempt"),
      rank_(rank),
      patience_(Env::read().connect_timeout.value_or(patience)),
      deadline_(Clock::now() + patience_) {
  if (base_ == nullptr) throw UsageError("the communicator '" + name_ + "' needs a store to be set up");
}

void AttemptStore::set(const std::string& key, const std::string& value) { view(deadline_).set(key, value); }

std::string AttemptStore::get(const std::string& key, Duration timeout) {
  return view(Clock::now() + timeout).get(key, timeout);
}

void AttemptStore::wait(const std::string& key, Duration timeout) { view(Clock::now() + timeout).wait(key, timeout); }

std::size_t AttemptStore::remove(std::span<const std::string> keys) { return view(deadline_).remove(keys); }

std::shared_ptr<Store> AttemptStore::another_client() { return view(deadline_).another_client(); }

Store& AttemptStore::view(Clock::time_point until) {
  {
    const std::lock_guard lock(mutex_);
    if (view_) return *view_;
  }
  auto made = std::make_unique<PrefixStore>(rank_ == 0 ? begin() : join(std::min(until, deadline_)), base_);
  const std::lock_guard lock(mutex_);
  view_ = std::move(made);
  return *view_;
}

std::string AttemptStore::begin() {
  const std::string token = to_hex(random_bytes(attempt_token_bytes));
  base_->set(key_, token);
  return token;
}

std::string AttemptStore::join(Clock::time_point until) {
  bool has_begun = false;
  while (true) {
    try {
      std::string token = base_->get(key_, std::max<Duration>(until - Clock::now(), store_probe));
      if (joined().add(token, rank_)) return token;
      has_begun = true;
    } catch (const TimeoutError&) {  // said below
    }
    if (Clock::now() >= until) {
      throw TimeoutError("rank 0 of communicator '" + name_ + "' did not begin to set it up " +
                             (has_begun ? "again " : "") + "within " + seconds_text(patience_) +
                             (has_begun ? "; after a set-up that failed every rank has to try again, or use a new name"
                                        : ": check that every rank is running and makes this call, and that all reach "
                                          "the store"),
                         {.rank = rank_, .peer = 0});
    }
    check_signals();
    std::this_thread::sleep_for(token_interval);
  }
}

}  // namespace holmes
