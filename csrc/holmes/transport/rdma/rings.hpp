// RdmaRings: the memory of a channel that the peer writes into: a head, the ring that is sent from and the one that is
// received into. Every lane's HCA has it registered, so what one lane began another one can go on with.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace holmes {

// Ports over which two ranks talk at most.
inline constexpr std::size_t max_lanes = 8;

// What the peer has taken of what this side sent; it writes it here.
struct RdmaCredit {
  std::uint64_t bytes = 0;     // copied out of its ring
  std::uint64_t messages = 0;  // of this lane, for which it has posted receives again
};

// Memory of the sender's user that the peer may read from instead of the ring; it writes it here. Sent as it is.
struct RdmaOffer {
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t lost = 0;                       // lanes, as below: it cannot be read over these
  std::array<std::uint32_t, max_lanes> keys{};  // by lane
};

// What a side has had once it uses a lane no more, from which the other one goes on. Sent as it is.
struct RdmaState {
  std::uint64_t lost = 0;      // a bit for each lane that it does not use any more
  std::uint64_t arrived = 0;   // bytes of the stream
  std::uint64_t consumed = 0;  // of these, copied out of the ring
  std::uint64_t offers = 0;
  std::uint64_t answers = 0;
};

// Bytes by lane that were read of what the peer offered. Sent as it is.
using RdmaReadCounts = std::array<std::uint64_t, max_lanes>;

class RdmaRings {
public:
  // `bytes`: of a ring, a power of two. Throws SystemError that names `nic`.
  RdmaRings(std::size_t bytes, const std::string& nic);
  RdmaRings(const RdmaRings&) = delete;
  RdmaRings& operator=(const RdmaRings&) = delete;
  ~RdmaRings();

  // A power of two, so that all pairs of a process lock a few dozen MiB.
  static std::size_t bytes_for(int size);

  std::size_t bytes() const { return bytes_; }
  // What is to be registered.
  std::byte* base() const { return base_; }
  std::size_t registered_bytes() const { return head_bytes + 2 * bytes_; }

  std::byte* send_ring() const { return base_ + head_bytes; }
  // Followed by itself: what begins in it lies in one piece.
  const std::byte* receive_ring() const { return send_ring() + bytes_; }
  std::uint64_t receive_offset() const { return head_bytes + bytes_; }

  // What the peer wrote here last; and where this side's is sent from.
  RdmaCredit credit() const;
  RdmaOffer offer() const;
  RdmaReadCounts read_counts() const;
  // The one that told of the loss of `lost` lanes: each is written once.
  RdmaState state(std::size_t lost) const;
  RdmaOffer& own_offer() { return at<RdmaOffer>(own_offer_offset); }
  RdmaReadCounts& own_read_counts() { return at<RdmaReadCounts>(own_counts_offset); }
  RdmaState& own_state(std::size_t lost) { return at<RdmaState>(own_states_offset + lost * slot_bytes); }

  static constexpr std::uint64_t credit_offset = 0;
  static constexpr std::uint64_t offer_offset = 64;
  static constexpr std::uint64_t counts_offset = 128;
  static constexpr std::uint64_t state_offset(std::size_t lost) { return states_offset + lost * slot_bytes; }

private:
  static constexpr std::size_t head_bytes = 4096;
  static constexpr std::uint64_t slot_bytes = 64;
  static constexpr std::uint64_t states_offset = 1024;
  static constexpr std::uint64_t own_offer_offset = 2048;
  static constexpr std::uint64_t own_counts_offset = 2112;
  static constexpr std::uint64_t own_states_offset = 3072;
  std::size_t mapped_bytes() const { return registered_bytes() + bytes_; }
  template <class What>
  What& at(std::uint64_t offset) const {
    static_assert(sizeof(What) <= slot_bytes);
    return *reinterpret_cast<What*>(base_ + offset);
  }
  template <class What>
  What read(std::uint64_t offset) const;

  std::size_t bytes_;
  std::uint64_t epoch_;
  std::byte* base_ = nullptr;
};

}  // namespace holmes
