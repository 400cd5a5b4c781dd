#include "holmes/comm/split.hpp"

#include <algorithm>

#include "holmes/core/error.hpp"

namespace holmes {

std::optional<CommunicatorOptions> split_options(Communicator& comm, const CommunicatorOptions& options, int number,
                                                 int color, int key) {
  if (color < -1)
    throw UsageError("split: color " + std::to_string(color) + " must be 0 or more, or -1 to take no part");
  // Who wants what.
  const auto size = static_cast<std::size_t>(comm.size());
  std::vector<std::int64_t> wishes(2 * size);
  std::vector<Buffer> outputs;
  for (std::size_t peer = 0; peer < size; ++peer) outputs.push_back({&wishes[2 * peer], 2, DType::int64, nullptr});
  std::int64_t own[2] = {color, key};
  comm.all_gather(std::move(outputs), {own, 2, DType::int64, nullptr}, {})->wait();

  if (color < 0) return std::nullopt;
  std::vector<std::pair<std::int64_t, std::size_t>> members;  // (key, rank)
  for (std::size_t peer = 0; peer < size; ++peer)
    if (wishes[2 * peer] == color) members.emplace_back(wishes[2 * peer + 1], peer);
  std::sort(members.begin(), members.end());
  CommunicatorOptions part = options;
  part.size = static_cast<int>(members.size());
  part.clusters.clear();
  part.labels.clear();
  for (std::size_t i = 0; i < members.size(); ++i) {
    const std::size_t rank = members[i].second;
    if (rank == static_cast<std::size_t>(comm.rank())) part.rank = static_cast<int>(i);
    if (!options.clusters.empty()) part.clusters.push_back(options.clusters[rank]);
  }
  part.name = options.name + "/split" + std::to_string(number) + "." + std::to_string(color);
  return part;
}

}  // namespace holmes
