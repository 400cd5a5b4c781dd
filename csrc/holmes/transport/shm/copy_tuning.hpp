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

// Copies that are worth two looks at the clock.
inline constexpr std::size_t min_timed_bytes = 16 * 1024;

// The average cost of the last copies, seconds per byte; 0 while none was added. `window_bytes`: of how many bytes, 0:
// of the last few, however large. What a few copies cost tells little of a stream: some find what they need in a cache.
class CopyCost {
public:
  explicit CopyCost(std::size_t window_bytes = 0) : window_bytes_(window_bytes) {}
  void add(std::size_t bytes, double seconds);
  float s_per_byte() const { return static_cast<float>(average_); }

private:
  std::size_t window_bytes_;
  double average_ = 0;
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

// What the two ways cost, seconds per byte; 0: unknown.
struct WayCosts {
  double ring = 0;
  double cma = 0;
};

// Long stretches of the stream go the better way, and short ones between them the other way, to learn what it costs by
// now. A short one is long enough for caches to hold what that way uses; yet it tends to cost less than a long one
// would (of a ring: half, as what it displaces from the caches is not paid for yet). So the stretch after a change is
// not so long, and shows by how much, and the change is undone where it was none for the better.
class CmaChoice {
public:
  CmaChoice(CmaUse use, std::size_t ring_bytes) : use_(use), trial_bytes_(8 * ring_bytes), left_(trial_bytes_) {}

  CmaUse use() const { return use_; }
  // Whether a piece of `bytes` goes by CMA; `set`: how all go.
  bool uses_cma(std::size_t bytes, std::optional<CopyWay> set) const;
  // So many were sent. The costs count where a stretch ends.
  void sent(std::size_t bytes, const WayCosts& costs);
  // What is left of a stretch, at least; any number where there are none.
  std::size_t stretch_bytes() const { return use_ == CmaUse::measured ? left_ : SIZE_MAX; }
  // Trials aside.
  bool prefers_cma() const { return use_ == CmaUse::always || is_better_; }
  // No more: the receiver cannot read this process's memory.
  void give_up();

private:
  void end_trial(const WayCosts& costs);
  void end_probation(const WayCosts& costs);
  static double of(bool cma, const WayCosts& costs) { return cma ? costs.cma : costs.ring; }

  CmaUse use_;
  std::size_t trial_bytes_;
  std::size_t left_;  // of this stretch
  bool is_trial_ = false;
  bool is_better_ = false;
  // After a change, what it was decided by: the costs of the new way, in the trial, and of the old one. 0: it has
  // stood.
  double promised_ = 0;
  double given_up_ = 0;
  double optimism_[2] = {1, 1};  // of trials: what a ring, and CMA, cost in the end, over what they cost in a trial
};

// Of messages, what all channels of a rank carry: whoever sends to one rank while another sends to it copies both. One
// thread at a time.
struct MessageBytes {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
};

// Whether one channel's pieces go through its ring or by CMA: the channel tells what it does, and asks. Sender and
// receiver each know the cost of their part; the receiver shares its own.
class ChannelTuning {
public:
  // `mine` and `theirs`: what this side and the peer measure as receivers. `messages`: null for collectives.
  ChannelTuning(CmaUse use, std::size_t ring_bytes, CmaRegion::Costs* mine, const CmaRegion::Costs* theirs,
                std::shared_ptr<MessageBytes> messages);

  CmaUse use() const { return choices_[both_ways].use(); }
  // For all pieces from now on; absent: as measured here.
  void set(std::optional<CopyWay> way) { set_ = way; }
  bool reads_in_place() const { return set_ == CopyWay::in_place; }
  bool uses_cma(std::size_t bytes) const { return choices_[traffic()].uses_cma(bytes, set_); }
  // So many bytes may be shown to the receiver at once: those of a trial end soon.
  std::size_t region_bytes() const;
  // Whether the receiver copies while this side does.
  bool is_one_way() const { return traffic() == one_way; }
  // Whether pieces are mostly copied out of the sender's memory, or read there.
  bool prefers_sender_memory() const;
  // The receiver cannot read this process's memory.
  void give_up();

  // What the sender did: copied into the ring, put so many bytes on their way, had `bytes` of `pieces` taken.
  void wrote(std::size_t bytes, double seconds) { write_cost_.add(bytes, seconds); }
  void offered(std::size_t bytes);
  void sent(std::span<const iovec> pieces, std::size_t bytes);
  // What the receiver did: one copy; a piece that it was asked for at `start`.
  void copied(std::size_t bytes, double seconds, bool by_cma) { add_cost(both_ways, by_cma, bytes, seconds); }
  void received(std::span<const iovec> pieces, std::size_t bytes, bool by_cma, Clock::time_point start);

private:
  // Messages that come while the rank sends none, timed from piece to piece; all else, of which copies are timed.
  enum Traffic { one_way, both_ways, traffic_count };
  static_assert(traffic_count == CmaRegion::cost_count);

  Traffic traffic() const;
  void add_cost(Traffic traffic, bool by_cma, std::size_t bytes, double seconds);

  CmaRegion::Costs* mine_;
  const CmaRegion::Costs* theirs_;
  CmaChoice choices_[traffic_count];
  std::optional<CopyWay> set_;
  CopyCost write_cost_;
  std::array<CopyCost, traffic_count> ring_costs_, cma_costs_;  // of receiving
  // Of messages: bytes of late, and of those that came between two pieces of one that goes; the last piece of each way.
  std::shared_ptr<MessageBytes> messages_;
  double sent_lately_ = 0;
  double came_meanwhile_ = 0;
  bool was_cma_ = false;
  const void* sent_end_ = nullptr;
  const void* received_end_ = nullptr;
  std::uint64_t received_before_ = 0;
  std::uint64_t sent_before_ = 0;
  Clock::time_point received_at_{};
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
  static constexpr std::size_t trial_samples = 3;
  static constexpr unsigned calls_per_refusal = 1000;
  struct Size {
    unsigned calls = 0;
    std::optional<CopyWay> preferred{};  // absent: the one to begin with
    std::array<CopyCost, copy_way_count> costs;
    std::array<double, trial_samples> trial{};  // seconds per byte, of the calls of this trial
  };
  struct Key {
    int operation;
    int size_bits;
    Memory memory;
    auto operator<=>(const Key&) const = default;
  };
  using Ways = std::array<bool, copy_way_count>;
  static Key key(int operation, std::size_t bytes, Memory memory);
  const Size& size(const Key& key) const;
  CopyWay way(const Size& size, Memory memory) const;
  CopyWay preferred(const Size& size, Memory memory) const;

  std::map<Key, Size> sizes_;
  // Those that all ranks can, as told last.
  std::array<Ways, memory_count> allowed_{{{true, false, false}, {true, false, false}}};
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
