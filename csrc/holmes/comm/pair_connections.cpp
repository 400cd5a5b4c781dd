#include "holmes/comm/pair_connections.hpp"

#include <algorithm>
#include <thread>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

// How often a pair's thread looks whether the peer has called; longer and longer.
constexpr Duration first_pause = 1ms;
constexpr Duration longest_pause = 100ms;

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

}  // namespace

std::string lost_key(const std::string& name, int rank) { return name + "/lost/" + std::to_string(rank); }

PairConnections::PairConnections(std::shared_ptr<Store> store, CommunicatorOptions options,
                                 std::function<void(const Failure&)> on_failure)
    : store_(std::move(store)), options_(std::move(options)), on_failure_(std::move(on_failure)) {}

std::vector<WorkPtr> PairConnections::start(int peer, std::vector<P2pCall> calls, const CallOptions& options) {
  std::vector<WorkPtr> works;
  std::shared_ptr<HostCommunicator> part;
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) throw_dead(options_.name, *failure_);
    const auto [found, is_first] = pairs_.try_emplace(peer);
    is_new = is_first;
    part = found->second.part;
    for (P2pCall& call : calls) {
      if (part) break;
      auto work = std::make_shared<WaitingWork>(weak_from_this(), options_.name);
      work->mark_running();
      const auto deadline = work->submitted() + options.timeout.value_or(options_.timeout);
      found->second.waiting.push_back({std::move(call), options, deadline, work});
      works.push_back(std::move(work));
    }
  }
  if (part)
    for (P2pCall& call : calls) works.push_back(start_on(*part, std::move(call), options));
  if (is_new) std::thread([self = shared_from_this(), peer] { self->connect(peer); }).detach();
  return works;
}

std::string PairConnections::key(int peer, int of_rank) const {
  const auto [low, high] = std::minmax(peer, options_.rank);
  return options_.name + "/pair" + std::to_string(low) + "-" + std::to_string(high) + "/called/" +
         std::to_string(of_rank);
}

// In a thread of its own. Whatever goes wrong ends the group, as it does where all are connected.
void PairConnections::connect(int peer) {
  try {
    if (!await(peer)) return;
    start_waiting(peer, make(peer));
  } catch (const HolmesError& error) {
    on_failure_(failure_of(error));
  } catch (const std::exception& error) {
    on_failure_({ErrorKind::system,
                 "communicator '" + options_.name + "': rank " + std::to_string(options_.rank) +
                     " cannot be connected with rank " + std::to_string(peer) + ": " + error.what(),
                 {.rank = options_.rank, .peer = peer}});
  }
}

bool PairConnections::await(int peer) {
  const auto value_of = [&](const std::string& name) -> std::optional<std::string> {
    try {
      return store_->get(name, store_probe);
    } catch (const TimeoutError&) {
      return std::nullopt;
    }
  };
  store_->set(key(peer, options_.rank), "1");
  auto pause = first_pause;
  while (!has_ended_) {
    if (value_of(key(peer, peer))) return true;
    if (const auto lost = value_of(lost_key(options_.name, peer)))
      if (const auto failure = decode_outcome(*lost, "a rank beside rank " + std::to_string(peer))) failure->raise();
    if (const auto late = overdue(peer)) late->raise();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, longest_pause);
  }
  return false;
}

std::optional<Failure> PairConnections::overdue(int peer) const {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  for (const Waiting& waiting : pairs_.at(peer).waiting) {
    if (now < waiting.deadline) continue;
    const std::string own = "rank " + std::to_string(options_.rank) + " (host " + host_name() + ")";
    return Failure{ErrorKind::timeout,
                   own + ": the deadline passed in communicator '" + options_.name + "': " +
                       (waiting.call.is_send ? "send of " : "recv of ") + std::to_string(waiting.call.buffer.bytes()) +
                       " bytes " + (waiting.call.is_send ? "to" : "from") + " rank " + std::to_string(peer) + ", tag " +
                       std::to_string(waiting.call.tag) + ": rank " + std::to_string(peer) +
                       " has called no send or recv with rank " + std::to_string(options_.rank) +
                       " yet; raise the timeout if this is expected",
                   {.rank = options_.rank, .peer = peer}};
  }
  return std::nullopt;
}

std::shared_ptr<HostCommunicator> PairConnections::make(int peer) {
  const auto [low, high] = std::minmax(peer, options_.rank);
  CommunicatorOptions part = options_;
  part.name += "/pair" + std::to_string(low) + "-" + std::to_string(high);
  part.size = 2;
  part.rank = options_.rank == low ? 0 : 1;
  part.labels = {low, high};
  return std::make_shared<HostCommunicator>(store_, std::move(part));
}

void PairConnections::start_waiting(int peer, const std::shared_ptr<HostCommunicator>& part) {
  while (true) {
    std::deque<Waiting> ready;
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
          if (!pairs || work->state() != WorkState::failed) return;
          try {
            std::rethrow_exception(work->error());
          } catch (const HolmesError& error) {
            pairs->on_failure_(failure_of(error));
          } catch (const std::exception& error) {
            pairs->on_failure_({ErrorKind::system, error.what(), {}});
          }
        });
      } catch (const HolmesError& error) {
        waiting.work->fail(error_of(failure_of(error)));
        on_failure_(failure_of(error));
      }
    }
  }
  part->fail(*failure_);
}

void PairConnections::fail(const Failure& failure) {
  std::vector<std::shared_ptr<HostCommunicator>> parts;
  std::deque<Waiting> waiting;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    has_ended_ = true;
    for (auto& [peer, pair] : pairs_) {
      if (pair.part) parts.push_back(pair.part);
      std::ranges::move(pair.waiting, std::back_inserter(waiting));
      pair.waiting.clear();
    }
  }
  for (const auto& part : parts) part->fail(failure);
  for (const Waiting& one : waiting) one.work->fail(error_of(failure));
}

void PairConnections::close() {
  std::vector<std::shared_ptr<HostCommunicator>> parts;  // they end outside the lock
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = Failure{ErrorKind::usage, "it was destroyed", {}};
  has_ended_ = true;
  for (auto& [peer, pair] : pairs_) parts.push_back(std::move(pair.part));
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
