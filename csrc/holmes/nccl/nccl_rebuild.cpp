// NcclCommunicators that come of others: split, and shrink after a failure or a planned removal.
#include <algorithm>

#include "holmes/comm/split.hpp"
#include "holmes/core/failure.hpp"
#include "holmes/core/log.hpp"
#include "holmes/nccl/nccl_communicator.hpp"

namespace holmes {

std::shared_ptr<Communicator> NcclCommunicator::split(int color, int key) {
  int number = 0;
  {
    std::lock_guard lock(mutex_);
    number = splits_++;
  }
  auto part = split_options(*control_, options_, number, color, key);
  return part ? make_nccl_communicator(store_, std::move(*part), nccl_options_) : nullptr;
}

bool NcclCommunicator::all_agree(bool here, Clock::time_point deadline) {
  std::int32_t answer = here ? 1 : 0;
  CallOptions call;
  call.timeout = std::max<Duration>(deadline - Clock::now(), std::chrono::milliseconds(1));
  control_->all_reduce({&answer, 1, DType::int32}, ReduceOp::min, call)->wait();
  return answer == 1;
}

// Whether NCCL made the new communicator on every rank; some may have it where others do not.
bool NcclCommunicator::shrink_from(NcclCommunicator& parent, const std::vector<int>& excluded,
                                   Clock::time_point deadline) {
  std::string failure;
  // Half of the time: the rest is for a new one, where a rank fails and the others wait for it here.
  const auto now = Clock::now();
  try {
    failure = session_->connect_shrunk(*parent.session_, excluded, now + (deadline - now) / 2);
  } catch (const HolmesError& error) {
    failure = error.what();
  }
  if (!failure.empty())
    log(LogLevel::info, options_.rank, "communicator '" + name() + "': not shrunk but made anew: " + failure);
  return all_agree(failure.empty(), deadline);
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::shrink(std::vector<int> excluded) {
  std::ranges::sort(excluded);
  const auto refuse = [&](const std::string& reason) {
    throw UsageError("shrink of communicator '" + options_.name + "': " + reason);
  };
  if (excluded.empty()) refuse("no rank is excluded; name those that are lost or leave");
  if (std::ranges::adjacent_find(excluded) != excluded.end()) refuse("a rank is named twice; name each once");
  for (const int rank : excluded) check_rank("shrink: excluded rank", rank);
  if (std::ranges::binary_search(excluded, options_.rank))
    refuse("rank " + std::to_string(options_.rank) + " excludes itself; only the ranks that stay call shrink");
  CommunicatorOptions rest = options_;
  {
    std::lock_guard lock(mutex_);
    rest.name = options_.name + "/shrink" + std::to_string(shrinks_++);
  }
  rest.size = options_.size - static_cast<int>(excluded.size());
  rest.rank = options_.rank - static_cast<int>(std::ranges::lower_bound(excluded, options_.rank) - excluded.begin());
  rest.labels.clear();
  auto made =
      std::shared_ptr<NcclCommunicator>(new NcclCommunicator(store_, std::move(rest), nccl_options_, this, excluded));
  abort("it was shrunk; use the communicator that shrink returned");
  return made;
}

}  // namespace holmes
