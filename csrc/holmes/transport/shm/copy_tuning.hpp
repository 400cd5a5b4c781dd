// How ranks of one host copy, and what it is decided by: the one place that weighs a ring in shared memory against
// reading the sender's memory (cross memory attach, CMA), and ordinary stores against those around the caches. All of
// it goes by what copies are measured to cost.
#pragma once

#include <sys/uio.h>

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "holmes/core/env.hpp"
#include "holmes/core/work.hpp"
#include "holmes/transport/channel.hpp"
#include "holmes/transport/shm/cma.hpp"

namespace holmes {

// Below, the word to the receiver and back costs more than the copies (measured: 64 KiB take twice as long).
inline constexpr std::size_t min_cma_bytes = 128 * 1024;

// The average cost of the last copies, seconds per byte; 0 while none was added. One that was interrupted counts
// little.
class CopyCost {
public:
  void add(double s_per_byte, double weight);
  float s_per_byte() const { return static_cast<float>(average_); }

private:
  double average_ = 0;
};

// What calls of one kind took, by the way they went. Most go the best way, and a few after each other another one, to
// learn what that costs by now. The first of those finds in the caches what the best way left there, and does not
// count, nor do the very first calls of all, which find memory that was never used.
class WayCosts {
public:
  using Allowed = std::array<bool, copy_way_count>;

  // How the next call goes; `best` mostly.
  CopyWay next(CopyWay best, const Allowed& allowed) const;
  // It took so long; absent: nothing was learned from it.
  void ended(CopyWay way, std::optional<double> s_per_byte);
  // Whether every other way is known to cost so much more that it need seldom be tried.
  void set_clear(bool is_clear);
  float s_per_byte(CopyWay way) const { return costs_[static_cast<std::size_t>(way)].s_per_byte(); }

private:
  static constexpr std::size_t trial_samples = 3;

  unsigned calls_ = 0;
  bool is_clear_ = false;
  std::array<CopyCost, copy_way_count> costs_;
  std::array<double, trial_samples> trial_{};  // of the calls of this trial
  std::size_t samples_ = 0;
};

// Which stores a ring's writer uses. A line that the reader still holds in its cache has to be taken from there before
// an ordinary store. Where the two cores share no cache (other sockets, other core complexes; a virtual machine's
// processors change from one second to the next) that costs several times what a store around the caches does, and
// where they do, less than the reader then loses. (Measured on 2 cores of Zen 4, GB/s of writing and reading 32 KiB in
// turns: cores 50 ns apart 7 to 20 and 35, around the caches 33 and 12; cores 250 ns apart 1.7 and 12, around the
// caches 33 and 14.) So some copies are timed both ways.
class StoreChoice {
public:
  // Bytes timed each way.
  static constexpr std::size_t sample_bytes = 4096;

  // Whether stores go around the caches.
  bool bypasses() const;
  // Whether the next copy, of `bytes`, is to be timed.
  bool wants_sample(std::size_t bytes);
  // What `sample_bytes` took each way, seconds.
  void add_sample(double cached_s, double bypassing_s);

private:
  unsigned copies_ = 0;               // since the last sample
  double difference_s_per_byte_ = 0;  // what ordinary stores cost more, on average over the last samples
};

// Of messages, what has come over all channels of a rank: whoever sends to one rank while another sends to it copies
// both. One thread at a time.
struct MessageBytes {
  std::uint64_t received = 0;
  // Where ranks share processors: calls of more go by CMA, all others through the ring, whatever single calls took.
  struct RingCalls {
    std::size_t one_way_bytes;
    std::size_t two_way_bytes;  // while this rank waits for messages, too
  };
  std::optional<RingCalls> ring_calls{};
};

// By size of what a sender was given at once, a call: through a ring or by CMA. A call is timed from its begin to where
// all of it is in the ring, or copied: of more than the ring holds that is what both sides' copies cost, and what they
// wait for each other.
class CallTuning {
public:
  // How the next call of so many bytes goes.
  CopyWay way(std::size_t bytes) const;
  // It took so long; absent: nothing was learned from it.
  void ended(std::size_t bytes, std::optional<double> seconds);

private:
  struct Size {
    explicit Size(CopyWay first) : best(first) {}
    CopyWay best;
    WayCosts costs;
  };
  CopyWay first_way(std::size_t bytes) const;

  std::map<int, Size> sizes_;  // by the bits of the number of bytes
};

// Whether one channel's pieces go through its ring or by CMA: the channel tells what it does, and asks.
class ChannelTuning {
public:
  // `messages`: null for collectives.
  ChannelTuning(CmaUse use, std::shared_ptr<MessageBytes> messages)
      : use_(use), way_(use == CmaUse::always ? CopyWay::cma : CopyWay::ring), messages_(std::move(messages)) {}

  CmaUse use() const { return use_; }
  // For all pieces from now on; absent: as measured here.
  void set(std::optional<CopyWay> way) { set_ = way; }
  // Of calls from now on. (What came meanwhile does not tell where ranks share processors: it depends on who ran
  // first.)
  void set_receives_meanwhile(bool receives) { receives_meanwhile_ = receives; }
  bool reads_in_place() const { return set_ == CopyWay::in_place; }
  // Of a piece of the call.
  bool uses_cma(std::size_t bytes) const;
  // Whether large pieces are copied out of the sender's memory, or read there, as far as is known.
  bool prefers_sender_memory() const { return set_ ? *set_ != CopyWay::ring : way_ == CopyWay::cma; }
  // Whether the receiver copies while this side does.
  bool is_one_way() const;
  // The receiver cannot read this process's memory.
  void give_up();
  // What was to be copied goes another way: this call tells nothing.
  void spoil() { is_spoiled_ = true; }

  // What the sender is about to send, and had taken of it; returns whether a call ends there, which is then told, with
  // how much of it is in the ring.
  void offer(std::span<const iovec> pieces);
  bool sent(std::span<const iovec> pieces, std::size_t bytes);
  void end_call(std::size_t unread_bytes);
  void received(std::size_t bytes);

private:
  CopyWay way_of_call(std::size_t bytes) const;

  CmaUse use_;
  std::optional<CopyWay> set_;
  CallTuning calls_;
  // The call under way, if any of it is left.
  CopyWay way_;
  bool is_spoiled_ = false;
  std::size_t call_bytes_ = 0;
  std::size_t left_bytes_ = 0;
  Clock::time_point begin_{};
  bool receives_meanwhile_ = false;
  // Of messages: bytes of late, and of those that came between two pieces of one that goes.
  std::shared_ptr<MessageBytes> messages_;
  double sent_lately_ = 0;
  double came_meanwhile_ = 0;
  const void* sent_end_ = nullptr;
  std::uint64_t received_before_ = 0;
};

// How a collective's pieces go between ranks that all share memory. What it took each way is measured, by operation,
// size and where its data is; all ranks tell each other and decide alike.
class CopyVote {
public:
  // Where what ranks send is: all of it in shared buffers, on every rank (see SharedBuffer), or not.
  enum Memory { ordinary, shared };
  static constexpr int memory_count = 2;

  // What calls take a rank, or all of them added up, by CopyWay, seconds per byte; 0: unknown. Infinite: not this way.
  struct Costs {
    std::array<float, copy_way_count> of{};
    float& operator[](CopyWay way) { return of[static_cast<std::size_t>(way)]; }
    float operator[](CopyWay way) const { return of[static_cast<std::size_t>(way)]; }
    // 0 and infinite ones stay what they are.
    Costs operator+(const Costs& other) const;
  };

  // What a rank tells the others, as it travels.
  struct Ballot {
    float ordinary_ring;
    float ordinary_cma;
    // The upper halves of floats, by CopyWay.
    std::array<std::uint16_t, copy_way_count> of_shared;
    std::uint16_t is_shared;  // whether what this rank sends is
    Costs costs(Memory memory) const;
  };
  static_assert(sizeof(Ballot) == 16);

  // What a rank's channels can, all of them.
  struct Abilities {
    CmaUse cma = CmaUse::measured;
    bool in_place = true;
  };

  // Whether a rank's share of so many bytes is worth a vote.
  static bool concerns(std::size_t bytes, int ranks);

  // How the next call of `operation` (any number) with `bytes` goes.
  CopyWay way(int operation, std::size_t bytes, Memory memory) const;
  // What this rank tells the others in it.
  Ballot ballot(int operation, std::size_t bytes, bool is_shared, const Abilities& abilities) const;
  // It ended, `seconds` after all ranks were there. `total`: of the costs of all ranks, in the same order everywhere.
  void ended(int operation, std::size_t bytes, Memory memory, double seconds, const Costs& total);
  // A peer could not read a shared buffer of this rank: none is shown to the group for many calls. (It may lack a
  // descriptor now and have one later.)
  void was_refused_in_place() { refused_calls_left_ = calls_per_refusal; }

private:
  static constexpr unsigned calls_per_refusal = 1000;
  struct Size {
    std::optional<CopyWay> preferred{};  // absent: the one to begin with
    WayCosts costs;
  };
  struct Key {
    int operation;
    Memory memory;
    int size_bits;
    auto operator<=>(const Key&) const = default;
  };
  static Key key(int operation, std::size_t bytes, Memory memory);
  // What is known of the next smaller size holds until more is.
  Size size(const Key& key) const;
  CopyWay way(const Size& size, Memory memory) const;
  CopyWay preferred(const Size& size, Memory memory) const;

  std::map<Key, Size> sizes_;
  // Those that all ranks can, as told last.
  std::array<WayCosts::Allowed, memory_count> allowed_{{{true, false, false}, {true, false, false}}};
  unsigned refused_calls_left_ = 0;
};

// Copies into memory that another processor core reads and that is written again and again, as a ring's is.
class RingCopy {
public:
  // memcpy; a release store after it publishes the copy. The regions must not overlap.
  void operator()(std::byte* destination, const void* source, std::size_t bytes);

private:
  StoreChoice choice_;
};

}  // namespace holmes
