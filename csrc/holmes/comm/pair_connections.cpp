#include "holmes/comm/pair_connections.hpp"

#include <algorithm>
#include <system_error>
#include <type_traits>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

// How often a pair's thread looks whether the peer has called; longer and longer.
constexpr Duration first_pause = 1ms;
constexpr Duration longest_pause = 100ms;
// How long a call on the store lasts before the thread looks up; stores with one connection serve others then.
constexpr Duration longest_store_wait = 50ms;

// Stands for a work of a pair that is not connected yet.
class WaitingWork final : public Work {
public:
  WaitingWork(std::weak_ptr<PairConnections> pairs, std::string name)
      : pairs_(std::move(pairs)), name_(std::move(name)) {}

private:
  void abandon(const std::string& reason) override {
    if (const auto pairs = pairs_.lock())
      pairs->fail({ErrorKind::aborted, "communicator '" + name_ + "' was aborted: " + reason, {}});
  }

  std::weak_ptr<PairConnections> pairs_;
  std::string name_;
};

// Ends `work` as `part` has ended.
void pass_on(Work& work, const Work& part) {
  work.set_source_rank(part.source_rank());
  if (part.state() == WorkState::failed)
    work.fail(part.error());
  else
    work.complete();
}

WorkPtr start_on(HostCommunicator& part, P2pCall call, CallOptions options) {
  options.async = true;
  const int other = 1 - part.rank();
  if (call.is_send) return part.send(std::move(call.buffer), other, call.tag, std::move(options));
  options.told_source = call.peer;
  return part.recv(std::move(call.buffer), other, call.tag, std::move(options));
}

std::optional<std::string> value_of(Store& store, const std::string& key) {
  try {
    return store.get(key, store_probe);
  } catch (const TimeoutError&) {
    return std::nullopt;
  }
}

}  // namespace

std::string lost_key(const std::string& name, int rank) { return name + "/lost/" + std::to_string(rank); }

// There is nothing to connect any more. Not a HolmesError: what sets a pair up takes those of a store for a key that
// nobody has set, or for the store's end, and would go on.
class PairConnections::Over final : public std::exception {
public:
  explicit Over(Failure failure) : failure_(std::move(failure)) {}
  const Failure& failure() const { return failure_; }
  const char* what() const noexcept override { return failure_.message.c_str(); }

private:
  Failure failure_;
};

// The group's store as a pair's thread uses it: no call goes on when there is nothing to connect any more.
class PairConnections::PairStore final : public Store {
public:
  PairStore(std::shared_ptr<const PairConnections> pairs, int peer) : pairs_(std::move(pairs)), peer_(peer) {}
  void set(const std::string& key, const std::string& value) override { pairs_.lock()->store_->set(key, value); }
  std::string get(const std::string& key, Duration timeout) override {
    return in_turns(timeout, [&](Store& store, Duration turn) { return store.get(key, turn); });
  }
  void wait(const std::string& key, Duration timeout) override {
    in_turns(timeout, [&](Store& store, Duration turn) { store.wait(key, turn); });
  }
  std::size_t remove(std::span<const std::string> keys) override { return pairs_.lock()->store_->remove(keys); }

private:
  template <typename Ask>
  std::invoke_result_t<Ask, Store&, Duration> in_turns(Duration timeout, const Ask& ask) {
    const auto pairs = pairs_.lock();  // whose thread calls
    const auto until = Clock::now() + timeout;
    while (true) {
      const Duration left = until - Clock::now();
      try {
        return ask(*pairs->store_, std::min(left, longest_store_wait));
      } catch (const TimeoutError&) {
        pairs->look(peer_);
        if (left <= longest_store_wait) throw;
      }
    }
  }

  std::weak_ptr<const PairConnections> pairs_;
  int peer_;
};

PairConnections::PairConnections(std::shared_ptr<Store> store, CommunicatorOptions options,
                                 std::function<void(const Failure&)> on_failure)
    : store_(std::move(store)), options_(std::move(options)), on_failure_(std::move(on_failure)) {}

WorkPtr PairConnections::start(P2pCall call, const CallOptions& options) {
  const int peer = call.peer;
  std::shared_ptr<HostCommunicator> part;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) throw_dead(options_.name, *failure_);
    Pair& pair = pairs_[peer];
    part = pair.part;
    if (!part) {
      const auto work = std::make_shared<WaitingWork>(weak_from_this(), options_.name);
      work->mark_running();
      const auto deadline = work->submitted() + options.timeout.value_or(options_.timeout);
      std::list<Waiting> room;
      room.push_back({std::move(call), options, deadline, work});
      try {
        if (!pair.thread.joinable())
          pair.thread = std::thread([self = shared_from_this(), peer] { self->connect(peer); });
      } catch (const std::system_error& error) {
        throw SystemError("communicator '" + options_.name + "': no thread can be started to connect rank " +
                              std::to_string(peer) + ": " + error.what(),
                          {.rank = options_.rank, .peer = peer, .system_errno = error.code().value()});
      }
      pair.waiting.splice(pair.waiting.end(), room);
      return work;
    }
  }
  return start_on(*part, std::move(call), options);
}

std::string PairConnections::name_with(int peer) const {
  const auto [low, high] = std::minmax(peer, options_.rank);
  return options_.name + "/pair" + std::to_string(low) + "-" + std::to_string(high);
}

// In a thread of its own. Whatever goes wrong ends the group, as it does where all are connected.
void PairConnections::connect(int peer) {
  try {
    std::call_once(has_own_client_, [this] {
      if (auto own = store_->another_client()) store_ = std::move(own);
    });
    const auto store = std::make_shared<PairStore>(shared_from_this(), peer);
    await(peer, *store);
    start_waiting(peer, make(peer, store));
  } catch (const std::exception& error) {
    const auto* const over = dynamic_cast<const Over*>(&error);
    Failure failure = over ? over->failure() : failure_of(std::current_exception());
    {
      const std::lock_guard lock(mutex_);
      if (has_ended_) return;
    }
    where_memory_allows([&] {
      if (!failure.context.rank) failure.context.rank = options_.rank;
      if (!failure.context.peer) failure.context.peer = peer;
    });
    on_failure_(failure);
  }
}

void PairConnections::await(int peer, Store& store) {
  const auto called = [&](int rank) { return name_with(peer) + "/called/" + std::to_string(rank); };
  store.set(called(options_.rank), "1");
  for (auto pause = first_pause; !value_of(store, called(peer)); pause = std::min(pause * 2, longest_pause)) {
    look(peer);
    std::unique_lock lock(mutex_);
    ended_.wait_for(lock, pause, [this] { return has_ended_; });
  }
  const std::lock_guard lock(mutex_);
  pairs_.at(peer).has_peer_called = true;
}

void PairConnections::look(int peer) const {
  if (const auto late = overdue(peer)) throw Over(*late);
  if (const auto lost = value_of(*store_, lost_key(options_.name, peer)))
    if (const auto failure = decode_outcome(*lost, "a rank beside rank " + std::to_string(peer))) throw Over(*failure);
}

std::optional<Failure> PairConnections::overdue(int peer) const {
  const std::lock_guard lock(mutex_);
  if (has_ended_) return failure_;
  const Pair& pair = pairs_.at(peer);
  const auto now = Clock::now();
  for (const auto& [call, options, deadline, work] : pair.waiting) {
    if (now < deadline) continue;
    const std::string other = "rank " + std::to_string(peer);
    return Failure{
        ErrorKind::timeout,
        "rank " + std::to_string(options_.rank) + " (host " + host_name() + "): the deadline passed in communicator '" +
            options_.name + "': " + (call.is_send ? "send of " : "recv of ") + std::to_string(call.buffer.bytes()) +
            " bytes " + (call.is_send ? "to " : "from ") + other + ", tag " + std::to_string(call.tag) + ": " + other +
            (pair.has_peer_called ? " has called too, but is not connected"
                                  : " has called no send or recv with rank " + std::to_string(options_.rank)) +
            " yet; raise the timeout if this is expected",
        {.rank = options_.rank, .peer = peer}};
  }
  return std::nullopt;
}

std::shared_ptr<HostCommunicator> PairConnections::make(int peer, std::shared_ptr<Store> store) {
  const auto [low, high] = std::minmax(peer, options_.rank);
  return std::make_shared<HostCommunicator>(
      std::move(store), part_options(options_, name_with(peer), {low, high}, options_.rank == low ? 0 : 1));
}

void PairConnections::start_waiting(int peer, const std::shared_ptr<HostCommunicator>& part) {
  while (true) {
    std::list<Waiting> ready;
    {
      const std::lock_guard lock(mutex_);
      if (failure_) break;
      Pair& pair = pairs_.at(peer);
      if (pair.waiting.empty()) {  // from now on calls go there themselves
        pair.part = part;
        return;
      }
      ready.swap(pair.waiting);
    }
    for (Waiting& waiting : ready) {
      try {
        waiting.options.timeout = std::max<Duration>(waiting.deadline - Clock::now(), std::chrono::nanoseconds(1));
        const WorkPtr work = start_on(*part, std::move(waiting.call), waiting.options);
        work->on_final([own = waiting.work, work, self = weak_from_this()] {
          pass_on(*own, *work);
          const auto pairs = self.lock();
          if (pairs && work->state() == WorkState::failed) pairs->on_failure_(failure_of(work->error()));
        });
      } catch (const std::exception&) {
        const Failure failure = failure_of(std::current_exception());
        waiting.work->fail(error_of(failure));
        on_failure_(failure);
      }
    }
  }
  part->fail(*failure_);
}

void PairConnections::fail(const Failure& failure) {
  std::list<Waiting> waiting;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure_or(failure.kind, [&] { return failure; });
    has_ended_ = true;
    for (auto& [peer, pair] : pairs_) {
      if (pair.part) pair.part->fail(failure);
      waiting.splice(waiting.end(), pair.waiting);
    }
  }
  ended_.notify_all();
  for (const Waiting& one : waiting) one.work->fail(error_of(failure));
}

void PairConnections::close() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = Failure{ErrorKind::usage, "it was closed", {}};
    has_ended_ = true;
  }
  ended_.notify_all();
  for (auto& [peer, pair] : pairs_)  // nothing is added any more
    if (pair.thread.joinable()) pair.thread.join();
  std::map<int, Pair> gone;  // they end outside the lock
  const std::lock_guard lock(mutex_);
  gone.swap(pairs_);
}

std::map<int, std::shared_ptr<HostCommunicator>> PairConnections::connected() const {
  std::map<int, std::shared_ptr<HostCommunicator>> parts;
  const std::lock_guard lock(mutex_);
  for (const auto& [peer, pair] : pairs_)
    if (pair.part) parts[peer] = pair.part;
  return parts;
}

std::size_t PairConnections::waiting() const {
  std::size_t count = 0;
  const std::lock_guard lock(mutex_);
  for (const auto& [peer, pair] : pairs_) count += pair.waiting.size();
  return count;
}

}  // namespace holmes
