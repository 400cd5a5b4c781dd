#include "holmes/comm/hierarchy.hpp"

#include <algorithm>
#include <map>

namespace holmes {
namespace {

// Smaller pieces cost more latency than their overlap gains; more of them shorten only what does not overlap, the first
// piece's reduce-scatter and the last one's all-gather, to a thirty-second.
constexpr std::size_t min_piece_bytes = 256 * 1024;
constexpr std::size_t max_pieces = 32;
// Cuts fall between cache lines.
constexpr std::size_t line_bytes = 64;

// `whole` in `parts` equal runs of whole cache lines; the last ones may be shorter or empty.
Run equal_part(const Run& whole, std::size_t parts, std::size_t index, DType dtype) {
  const std::size_t line = line_bytes / size_bytes(dtype);
  const std::size_t step = ((whole.count + parts - 1) / parts + line - 1) / line * line;
  const std::size_t begin = std::min(whole.count, index * step);
  const std::size_t end = std::min(whole.count, begin + step);
  return {whole.begin + begin, end - begin};
}

}  // namespace

Hierarchy::Hierarchy(const std::vector<int>& cluster_of, int rank) : rank_(rank) {
  std::map<int, int> numbers;
  for (std::size_t r = 0; r < cluster_of.size(); ++r) {
    const auto [found, is_new] = numbers.try_emplace(cluster_of[r], static_cast<int>(members_.size()));
    if (is_new) members_.emplace_back();
    auto& members = members_[static_cast<std::size_t>(found->second)];
    cluster_.push_back(found->second);
    index_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(r));
  }
  const auto [smallest, largest] = std::minmax_element(
      members_.begin(), members_.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  share_count_ = static_cast<int>(smallest->size());
  equal_ = smallest->size() == largest->size();
}

std::vector<int> Hierarchy::counterparts() const {
  std::vector<int> ranks;
  for (const auto& members : members_) ranks.push_back(members[static_cast<std::size_t>(index())]);
  return ranks;
}

Run Hierarchy::share(const Run& whole, int index, DType dtype) const {
  if (index >= share_count_) return {whole.begin + whole.count, 0};
  return equal_part(whole, static_cast<std::size_t>(share_count_), static_cast<std::size_t>(index), dtype);
}

std::vector<Run> cut_into_pieces(std::size_t count, DType dtype) {
  const std::size_t pieces = std::clamp<std::size_t>(count * size_bytes(dtype) / min_piece_bytes, 1, max_pieces);
  std::vector<Run> runs;
  for (std::size_t i = 0; i < pieces; ++i) {
    const Run run = equal_part({0, count}, pieces, i, dtype);
    if (run.count || runs.empty()) runs.push_back(run);
  }
  return runs;
}

Buffer slice(const Buffer& whole, const Run& run) {
  return {whole.begin() + run.begin * size_bytes(whole.dtype), run.count, whole.dtype, whole.owner};
}

}  // namespace holmes
