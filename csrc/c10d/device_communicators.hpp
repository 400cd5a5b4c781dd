// DeviceCommunicators: the NCCL communicators of a process group, each made when it is first needed.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "holmes/nccl/nccl_communicator.hpp"

namespace holmes::torch_backend {

// A group has one GPU per process, that of its first tensor on a device. Its collectives have one communicator of all
// ranks; a send or receive outside of a coalescing block has one of the two ranks, as the others do not take part and
// a group that was never used has no communicator yet. Thread-safe.
class DeviceCommunicators {
public:
  // Makes the communicator of the group's ranks `members`, for this process's GPU. Collective over them.
  using Make =
      std::function<std::shared_ptr<NcclCommunicator>(int device, const std::string& name, std::vector<int> members)>;

  // `make` null: the group has no devices.
  DeviceCommunicators(std::string name, int rank, int size, Make make)
      : name_(std::move(name)), rank_(rank), size_(size), make_(std::move(make)) {}

  bool can_make() const { return make_ != nullptr; }
  // Collective over the group where it is not there yet. Throws UsageError for a second GPU, and inside a capture into
  // a CUDA graph, which cannot make a communicator.
  std::shared_ptr<NcclCommunicator> group(c10::Device device);
  // As group, of `members`, this rank among them, in ascending order; what is there is of the same members.
  std::shared_ptr<NcclCommunicator> of(c10::Device device, std::vector<int> members);
  // As group, of this rank and `peer`: ranks 0 and 1 in the order of the group's.
  std::shared_ptr<NcclCommunicator> pair(c10::Device device, int peer);
  // `communicator` is from now on that of all ranks.
  void adopt(const std::shared_ptr<NcclCommunicator>& communicator);
  // All that there are.
  std::vector<std::shared_ptr<NcclCommunicator>> made() const;
  // Of all ranks; null where none was needed yet.
  std::shared_ptr<NcclCommunicator> existing_group() const;
  void clear();

private:
  std::vector<int> all_ranks() const;

  const std::string name_;
  const int rank_;
  const int size_;
  const Make make_;
  std::mutex making_;
  mutable std::mutex mutex_;                                            // protects what follows
  int device_ = -1;                                                     // -1: no tensor yet
  std::map<std::vector<int>, std::shared_ptr<NcclCommunicator>> made_;  // by members
  std::shared_ptr<NcclCommunicator> whole_;                             // of these, that of all ranks
};

}  // namespace holmes::torch_backend
