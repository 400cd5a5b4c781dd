// PartCommunicator: a Communicator for host memory that others are made of (hierarchical_communicator.hpp).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "holmes/collectives/collective_header.hpp"
#include "holmes/comm/communicator.hpp"
#include "holmes/core/error.hpp"

namespace holmes {

class PartCommunicator : public Communicator {
public:
  // Collective without payload: MismatchError where the ranks' signatures (but for the sequence number, which is set
  // here) differ.
  virtual WorkPtr announce(const Signature& signature, CallOptions call) = 0;
  // As abort, with this failure.
  virtual void fail(const Failure& failure) = 0;
  virtual std::optional<Failure> failure() const = 0;
  virtual Failure abort_failure(const std::string& reason) const = 0;
  // From now on `told` is called once a peer that it is connected with aborts, leaves or is lost, though no operation
  // is under way; once or more, by any thread. Peers of a wide one that has not only left reach every rank.
  virtual void watch_peers(const std::function<void(const Failure&)>& told) = 0;
  // Whether RDMA turned out not to work between the ranks of the own cluster.
  virtual bool has_left_rdma() const = 0;
  // Whether ranks are so far from each other that what goes there takes long; a wide one does not know.
  virtual bool is_far() const = 0;
  // Whether a broadcast of so many bytes enters each cluster once, from rank to rank, and ends locally.
  virtual bool broadcasts_along_tree(std::size_t bytes) const = 0;
};

// Collective: a mesh, or, of many ranks, a wide one.
std::shared_ptr<PartCommunicator> make_part(std::shared_ptr<Store> store, CommunicatorOptions options);
// The same, of options that are yet to be completed (NICs, TLS and integrity of the environment).
std::shared_ptr<PartCommunicator> make_whole_part(std::shared_ptr<Store> store, CommunicatorOptions options);

}  // namespace holmes
