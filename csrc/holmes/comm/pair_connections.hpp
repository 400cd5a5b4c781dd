// PairConnections: sends and receives of a wide group between ranks that share neither a row nor a column.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "holmes/comm/host_communicator.hpp"

namespace holmes {

// A pair is connected when both of its ranks have called, in a thread for each pair that is not connected yet; what is
// called before waits there. Thread-safe.
class PairConnections : public std::enable_shared_from_this<PairConnections> {
public:
  // `options`: the group's. `on_failure` hears of what ends a pair; it must not block.
  PairConnections(std::shared_ptr<Store> store, CommunicatorOptions options,
                  std::function<void(const Failure&)> on_failure);

  // Asynchronous. Calls with one peer stay in order.
  WorkPtr start(P2pCall call, const CallOptions& options);
  // Ends all of them, and what waits, also where memory is short. Does not block.
  void fail(const Failure& failure);
  // The group is destroyed: leaves all pairs in order, and waits for the threads, which end soon.
  void close();
  // By peer, those that are connected.
  std::map<int, std::shared_ptr<HostCommunicator>> connected() const;
  // What waits for a connection.
  std::size_t waiting() const;

private:
  class Over;
  class PairStore;
  struct Waiting {
    P2pCall call;
    CallOptions options;
    Clock::time_point deadline;
    WorkPtr work;
  };
  struct Pair {
    std::shared_ptr<HostCommunicator> part{};
    std::list<Waiting> waiting{};
    std::thread thread{};
    bool has_peer_called = false;
  };

  void connect(int peer);
  // Until the peer has called too.
  void await(int peer, Store& store);
  std::shared_ptr<HostCommunicator> make(int peer, std::shared_ptr<Store> store);
  void start_waiting(int peer, const std::shared_ptr<HostCommunicator>& part);
  // Throws Over where all has ended, the peer is lost, or a deadline has passed.
  void look(int peer) const;
  std::optional<Failure> overdue(int peer) const;
  std::string name_with(int peer) const;

  std::shared_ptr<Store> store_;
  std::once_flag has_own_client_;  // of the store: the owner may wait in a call on this one
  const CommunicatorOptions options_;
  const std::function<void(const Failure&)> on_failure_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;
  std::map<int, Pair> pairs_;
  std::optional<Failure> failure_;
};

// In the store: why rank `rank` of communicator `name` is lost, as a rank saw it that is connected with it.
std::string lost_key(const std::string& name, int rank);

}  // namespace holmes
