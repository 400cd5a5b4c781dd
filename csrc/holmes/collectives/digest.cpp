#include "holmes/collectives/digest.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "holmes/core/crc32c.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

// Read between two looks at everything else.
constexpr std::size_t read_at_once_bytes = 4 * 1024 * 1024;

std::string hex(std::uint64_t crc) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "%08x", static_cast<unsigned>(crc));
  return text.data();
}

}  // namespace

ResultDigest::ResultDigest(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                           Clock::time_point deadline, std::vector<Buffer> result, std::string own_place)
    : Exchange(group, signature, std::move(work), deadline, {}, {}),
      result_(std::move(result)),
      own_place_(std::move(own_place)),
      crcs_(static_cast<std::size_t>(group.size)) {
  for (auto& crc : crcs_) {
    sends_.push_back({&crcs_[static_cast<std::size_t>(group.rank)], 1, DType::int64, nullptr});
    recvs_.push_back({&crc, 1, DType::int64, nullptr});
  }
}

bool ResultDigest::compute() {
  if (!is_read_) return read_some();
  if (is_compared_) return false;
  // The others hear of this rank's before it fails.
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && involves(peer)) return false;
  compare();
  is_compared_ = true;
  return true;
}

bool ResultDigest::read_some() {
  std::uint64_t& own = crcs_[static_cast<std::size_t>(group_.rank)];
  std::size_t left = read_at_once_bytes;
  while (left > 0 && piece_ < result_.size()) {
    const Buffer& piece = result_[piece_];
    const std::size_t bytes = std::min(left, piece.bytes() - offset_);
    if (bytes > 0) own = crc32c(static_cast<std::uint32_t>(own), piece.begin() + offset_, bytes);
    offset_ += bytes;
    left -= bytes;
    if (offset_ == piece.bytes()) ++piece_, offset_ = 0;
  }
  is_read_ = piece_ == result_.size();
  return true;
}

void ResultDigest::compare() const {
  const auto count = [&](std::uint64_t crc) { return 2 * std::ranges::count(crcs_, crc); };
  const auto most = std::ranges::find_if(crcs_, [&](std::uint64_t crc) { return count(crc) > group_.size; });
  const bool has_majority = most != crcs_.end();
  if (has_majority && count(*most) == 2 * group_.size) return;
  std::string who;
  std::optional<int> named;  // another rank, where there is one
  for (int rank = 0; rank < group_.size; ++rank) {
    const std::uint64_t crc = crcs_[static_cast<std::size_t>(rank)];
    if (has_majority && crc == *most) continue;
    add_word(who, place(rank) + " (CRC32C " + hex(crc) + ")");
    if (!named || *named == group_.rank) named = rank;
  }
  ErrorContext context{.rank = group_.label(group_.rank), .peer = {}, .host = {}, .nic = {}, .system_errno = {}};
  if (*named != group_.rank) {
    const ControlConnection& control = *group_.controls[static_cast<std::size_t>(*named)];
    context.peer = group_.label(*named);
    context.host = control.host();
    context.nic = control.nic();
  }
  const std::string others = has_majority ? "not that of the other ranks (" + hex(*most) + "): "
                                          : "not the same on all ranks, and no majority says which is right: ";
  throw IntegrityError("communicator '" + group_.name + "': the result of " + describe() + " is " + others + who +
                           ", found by " + own_place_ + integrity_advice,
                       context);
}

std::string ResultDigest::place(int rank) const {
  return rank == group_.rank ? own_place_ : group_.controls[static_cast<std::size_t>(rank)]->describe();
}

}  // namespace holmes
