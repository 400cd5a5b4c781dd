// Group: what operations see of their communicator.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "holmes/core/error.hpp"
#include "holmes/group/control_connection.hpp"
#include "holmes/group/whole_progress.hpp"
#include "holmes/record/flight_recorder.hpp"
#include "holmes/transport/channel.hpp"
#include "holmes/transport/shared_buffer.hpp"
#include "holmes/transport/shm/copy_tuning.hpp"

namespace holmes {

// Only the driver touches it while an operation runs.
struct Group {
  int rank = 0;
  int size = 1;
  std::string name;
  std::vector<int> labels;                                   // number of each rank in messages; empty: its own
  std::vector<std::unique_ptr<Channel>> channels;            // for collectives, by rank; own is null
  std::vector<std::unique_ptr<ControlConnection>> controls;  // by rank; own is null
  std::size_t slice_bytes = 64 * 1024;                       // unit of pipelining, agreed at set-up
  bool is_far = false;                                       // a pair of ranks is, as all agreed; see far_round_trip
  bool is_direct = false;  // all channels move what lasts from memory to memory, as all agreed; see Channel
  // Of one that spans clusters, by rail: the uplinks that it shares with `neighbours`, the other ranks of the own
  // cluster.
  std::vector<std::shared_ptr<Uplink>> uplinks;
  std::vector<int> neighbours;
  bool local_completion = false;   // of operations with a root, as all ranks agreed; see CommunicatorOptions
  bool any_shared_memory = false;  // a pair of this rank
  bool all_shared_memory = true;   // every pair of ranks, as all ranks agreed
  bool takes_short = false;        // few ranks, and the channels of this one do; see ShortCall
  // By rank, as all ranks agreed: the first rank with which it shares memory, itself where there is none before.
  std::vector<int> memory_leaders;
  // By rank: the first rank of its cluster; of a group within one: 0.
  std::vector<int> cluster_leaders;
  // By rank, of how many operations that have ended here the header is still to come (local_completion only): what
  // follows them belongs to later operations.
  std::vector<std::uint32_t> owed;
  // Whether a channel keeps what is to be sent later (any thread may look), and until when it matters; see
  // Channel::try_send_later.
  std::atomic<bool> keeps_any = false;
  bool keeps_payload = false;  // and not headers alone
  Clock::time_point kept_until{};
  CopyVote copy_vote;
  std::size_t pinned_ring_bytes = 0;  // per peer, direction and GPU, for messages of a GPU's memory
  // Memory for the one collective that runs; grows, never shrinks.
  std::vector<std::byte> staging;
  std::unique_ptr<SharedBuffer> shared_staging;  // instead, where HCAs write into it
  RoundClock clock;
  std::shared_ptr<WholeProgress> whole;  // of the wide group that this is a row or a column of; else null
  std::unique_ptr<FlightRecorder> recorder = std::make_unique<FlightRecorder>(0);

  // A channel keeps what belongs to an operation with such a deadline.
  void keep_until(Clock::time_point deadline) {
    keeps_any = true;
    kept_until = std::max(kept_until, deadline);
  }
  int label(int of_rank) const { return labels.empty() ? of_rank : labels[static_cast<std::size_t>(of_rank)]; }
  // all_reduce goes in one step where that costs no more bytes than this. Two ranks send each other no more than in two
  // steps, and far ones save a round trip; it takes memory of that length.
  std::size_t one_step_bytes() const { return is_far && size == 2 ? 8 * 1024 * 1024 : 64 * 1024; }
  // 64-byte aligned, valid for the running collective.
  std::byte* staging_bytes(std::size_t bytes) {
    if (is_direct) {
      if (shared_staging && shared_staging->bytes() >= bytes) return shared_staging->data();
      shared_staging = make_shared_staging(std::max<std::size_t>(bytes, 4096));
      if (shared_staging) return shared_staging->data();
    }
    constexpr std::size_t alignment = 64;
    if (staging.size() < bytes + alignment) staging.resize(bytes + alignment);
    const auto address = reinterpret_cast<std::uintptr_t>(staging.data());
    return staging.data() + (alignment - address % alignment) % alignment;
  }

private:
  // Null where the system gives none: it may be short of descriptors.
  static std::unique_ptr<SharedBuffer> make_shared_staging(std::size_t bytes) {
    try {
      return std::make_unique<SharedBuffer>(bytes);
    } catch (const SystemError&) {
      return nullptr;
    }
  }
};

}  // namespace holmes
