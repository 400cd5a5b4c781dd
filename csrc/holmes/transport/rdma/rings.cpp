#include "holmes/transport/rdma/rings.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"

namespace holmes {

std::size_t RdmaRings::bytes_for(int size) {
  constexpr std::size_t total_bytes = 8 << 20;
  const std::size_t share = total_bytes / static_cast<std::size_t>(std::max(size - 1, 1));
  return std::bit_floor(std::clamp<std::size_t>(share, 64 * 1024, 2 * 1024 * 1024));
}

// The head, the ring that is sent from, the ring that is received into, and that again.
RdmaRings::RdmaRings(std::size_t bytes, const std::string& nic) : bytes_(bytes), epoch_(fork_epoch()) {
  const UniqueFd memory(::memfd_create("holmes-rdma", MFD_CLOEXEC));
  const auto check = [&](bool holds) {
    if (holds) return;
    const int error = errno;
    if (base_ != nullptr) ::munmap(base_, mapped_bytes());
    throw SystemError("cannot map " + std::to_string(mapped_bytes()) + " bytes for RDMA over " + nic + ": " +
                          errno_text(error) + limit_text(error),
                      {.nic = nic, .system_errno = error});
  };
  check(memory && ::ftruncate(memory.get(), static_cast<off_t>(registered_bytes())) == 0);
  void* const place = ::mmap(nullptr, mapped_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check(place != MAP_FAILED);
  base_ = static_cast<std::byte*>(place);
  const auto map_at = [&](std::size_t to, std::size_t count, std::size_t from) {
    check(::mmap(base_ + to, count, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.get(),
                 static_cast<off_t>(from)) != MAP_FAILED);
  };
  map_at(0, registered_bytes(), 0);
  map_at(registered_bytes(), bytes_, registered_bytes() - bytes_);
  ::madvise(base_, mapped_bytes(), MADV_DONTFORK);
}

RdmaRings::~RdmaRings() {
  if (epoch_ == fork_epoch()) ::munmap(base_, mapped_bytes());  // a child has none of it
}

// The HCA writes it, before the completion that tells of it.
template <class What>
What RdmaRings::read(std::uint64_t offset) const {
  static_assert(sizeof(What) % sizeof(std::uint64_t) == 0);
  What read{};
  auto* const from = reinterpret_cast<std::uint64_t*>(base_ + offset);
  std::array<std::uint64_t, sizeof(What) / sizeof(std::uint64_t)> words;
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = std::atomic_ref(from[i]).load(std::memory_order_acquire);
  std::memcpy(static_cast<void*>(&read), words.data(), sizeof read);
  return read;
}

RdmaCredit RdmaRings::credit() const { return read<RdmaCredit>(credit_offset); }
RdmaOffer RdmaRings::offer() const { return read<RdmaOffer>(offer_offset); }
RdmaReadCounts RdmaRings::read_counts() const { return read<RdmaReadCounts>(counts_offset); }
RdmaState RdmaRings::state(std::size_t lost) const { return read<RdmaState>(state_offset(lost)); }

}  // namespace holmes
