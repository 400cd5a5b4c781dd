#include "device_communicators.hpp"

#include <algorithm>
#include <numeric>

#include "device_stream.hpp"
#include "holmes/core/error.hpp"

namespace holmes::torch_backend {

std::shared_ptr<NcclCommunicator> DeviceCommunicators::group(c10::Device device) {
  {
    const std::lock_guard lock(mutex_);
    if (whole_ && device_ == device.index()) return whole_;
  }
  return of(device, all_ranks());
}

std::vector<int> DeviceCommunicators::all_ranks() const {
  std::vector<int> members(static_cast<std::size_t>(size_));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

std::shared_ptr<NcclCommunicator> DeviceCommunicators::pair(c10::Device device, int peer) {
  if (peer < 0 || peer >= size_)
    throw UsageError("rank " + std::to_string(peer) + " is not in process group '" + name_ + "'; it has ranks 0 to " +
                     std::to_string(size_ - 1));
  if (peer == rank_)
    throw UsageError("rank " + std::to_string(peer) + " of process group '" + name_ +
                     "' cannot send to or receive from itself; copy the tensor instead");
  return of(device, {std::min(rank_, peer), std::max(rank_, peer)});
}

std::shared_ptr<NcclCommunicator> DeviceCommunicators::of(c10::Device device, std::vector<int> members) {
  const auto find = [&]() -> std::shared_ptr<NcclCommunicator> {
    const std::lock_guard lock(mutex_);
    if (device_ >= 0 && device_ != device.index())
      throw UsageError("the tensor is on " + device.str() + ", but process group '" + name_ + "' works on cuda:" +
                       std::to_string(device_) + " in this process; use one device per process and group");
    const auto found = made_.find(members);
    return found == made_.end() ? nullptr : found->second;
  };
  if (auto found = find()) return found;
  if (!make_)
    throw UsageError("the tensor is on " + device.str() + ", but process group '" + name_ +
                     "' was made without a way to NCCL; make it with init_process_group(\"cpu:holmes,cuda:holmes\")");
  // One after the other: the ranks make them in the order of their calls.
  const std::lock_guard making(making_);
  if (auto found = find()) return found;
  if (cuda::capture_of(current_stream(device)))
    throw UsageError("the first operation of process group '" + name_ +
                     "' on a GPU connects it, which a capture into a CUDA graph cannot hold; run one before");
  {
    const std::lock_guard lock(mutex_);
    device_ = device.index();
  }
  std::string name = name_ + "/device";
  if (static_cast<int>(members.size()) < size_)
    name += (members.size() == 2 ? "/" : "/cluster") + std::to_string(members.front()) + "-" +
            std::to_string(members.back());
  auto made = make_(device.index(), name, members);
  const std::lock_guard lock(mutex_);
  if (static_cast<int>(members.size()) == size_) whole_ = made;
  made_[std::move(members)] = made;
  return made;
}

void DeviceCommunicators::adopt(const std::shared_ptr<NcclCommunicator>& communicator) {
  const std::lock_guard lock(mutex_);
  device_ = *communicator->device();
  made_[all_ranks()] = whole_ = communicator;
}

std::vector<std::shared_ptr<NcclCommunicator>> DeviceCommunicators::made() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<NcclCommunicator>> all;
  for (const auto& [members, communicator] : made_) all.push_back(communicator);
  return all;
}

std::shared_ptr<NcclCommunicator> DeviceCommunicators::existing_group() const {
  const std::lock_guard lock(mutex_);
  return whole_;
}

void DeviceCommunicators::clear() {
  std::map<std::vector<int>, std::shared_ptr<NcclCommunicator>> ended;  // after the lock
  const std::lock_guard lock(mutex_);
  whole_ = nullptr;
  ended.swap(made_);
}

}  // namespace holmes::torch_backend
