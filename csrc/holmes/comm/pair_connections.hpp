// PairConnections: sends and receives of a wide group between ranks that share neither a row nor a column.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "holmes/comm/host_communicator.hpp"

namespace holmes {

// A pair is connected when both of its ranks have called, in a thread for each pair that is not connected yet; what is
// called before waits there. Thread-safe.
class PairConnections : public std::enable_shared_from_this<PairConnections> {
public:
  // `options`: the group's. `on_failure` hears of what ends a pair; it must not block.
  PairConnections(std::shared_ptr<Store> store, CommunicatorOptions options,
                  std::function<void(const Failure&)> on_failure);

  // Works of calls with `peer`, in their order. They are not final on return.
  std::vector<WorkPtr> start(int peer, std::vector<P2pCall> calls, const CallOptions& call);
  // Ends all of them, and what waits. Does not block.
  void fail(const Failure& failure);
  // The group is destroyed: leaves all pairs in order.
  void close();
  // By peer, those that are connected.
  std::map<int, std::shared_ptr<HostCommunicator>> connected() const;
  // What waits for a connection.
  std::size_t waiting() const;

private:
  struct Waiting {
    P2pCall call;
    CallOptions options;
    Clock::time_point deadline;
    WorkPtr work;
  };
  struct Pair {
    std::shared_ptr<HostCommunicator> part{};
    std::deque<Waiting> waiting{};
  };

  void connect(int peer);
  // Until the peer has called too; false where all has ended.
  bool await(int peer);
  std::shared_ptr<HostCommunicator> make(int peer);
  void start_waiting(int peer, const std::shared_ptr<HostCommunicator>& part);
  std::optional<Failure> overdue(int peer) const;
  std::string key(int peer, int of_rank) const;

  const std::shared_ptr<Store> store_;
  const CommunicatorOptions options_;
  const std::function<void(const Failure&)> on_failure_;
  std::atomic<bool> has_ended_{false};
  mutable std::mutex mutex_;
  std::map<int, Pair> pairs_;
  std::optional<Failure> failure_;
};

// In the store: why rank `rank` of communicator `name` is lost, as a rank saw it that is connected with it.
std::string lost_key(const std::string& name, int rank);

}  // namespace holmes
