// P2pEngine: sends and receives of a communicator. Messages of a pair match by tag, in order.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>

#include "holmes/core/options.hpp"
#include "holmes/core/types.hpp"
#include "holmes/cuda/staged_message.hpp"
#include "holmes/group/group.hpp"
#include "holmes/record/communicator_record.hpp"

namespace holmes {

// A message of at most most_short_bytes in host memory, which lives until the call is over.
struct ShortMessage {
  bool is_send = true;
  void* data = nullptr;
  std::size_t bytes = 0;
  DType dtype = DType::uint8;
  int peer = 0;
  std::uint32_t tag = 0;
  std::shared_ptr<Work> completed{};  // set once it is carried out
};

// Only the driver calls it, except where noted.
class P2pEngine {
public:
  struct Request {
    bool is_send = true;
    Buffer buffer;
    std::optional<int> peer;  // absent: receive from any rank
    std::uint32_t tag = 0;
    std::shared_ptr<Work> work;
    Clock::time_point deadline;
    std::uint64_t sequence = 0;  // of this rank's sends and receives
    std::uint64_t record = 0;    // its number in the flight recorder
    RecordedCall recorded_call() const;
    cuda::EventPtr begin{};  // of a GPU's memory: its copies come after this
    // Of a receive into host memory that takes a shorter message too: where to write the message's bytes, before `work`
    // is final.
    std::shared_ptr<std::size_t> received_bytes{};
    std::optional<int> told_source{};  // see CallOptions
  };

  // `wake_fd`: an event descriptor that makes the driver call `advance` again.
  P2pEngine(Group& group, std::vector<std::unique_ptr<Channel>> channels, int wake_fd);

  void submit(Request request);
  // Whether `carry` may be called.
  ShortState state_of(const ShortMessage& message);
  // Carries it out, for the caller at least: what does not go at once of a message that has begun to is kept, and
  // pending until `deadline`. Returns false where nothing went. Throws std::bad_alloc where it cannot be kept.
  bool carry(const ShortMessage& message, Clock::time_point deadline);
  // Moves what can be moved without blocking. Returns whether anything moved.
  bool advance();
  bool is_idle() const { return pending_ == 0; }
  std::size_t pending() const { return pending_; }
  // The works that are not final, taken out (to fail them). Takes no memory; nothing can be submitted any more.
  std::vector<std::shared_ptr<Work>> take_pending();
  std::optional<Clock::time_point> next_deadline() const;
  // "recv of 4096 bytes from rank 2 (host b0) on NIC eth0, tag 0: nothing received": what is not finished by `now`.
  std::string describe_overdue(Clock::time_point now) const;

  // What is not finished, appended up to `max_pending` in all; its number.
  std::size_t append_pending(std::vector<PendingOperation>& pending) const;
  PeerMessages messages(int peer) const { return {peers_[peer].sent_messages, peers_[peer].arrived_messages, false}; }

  bool awaits_recv(int peer) const;
  // In order: those with whom something is pending. With all others nothing moves.
  const std::vector<int>& active_peers() const { return active_; }
  // Bytes that will come / can be sent next without a break, as Collective's; at least 1 where any is awaited.
  std::size_t awaited_recv_bytes(int peer) const;
  std::size_t awaited_send_bytes(int peer) const;
  // Whether the peer's stream closed while only receives from any rank, or a watch, looked at it.
  bool has_ended(int peer) const { return peers_[peer].ended; }
  // Whether what is pending cannot end without `peer`. A receive from any rank can do without one that left in order,
  // as long as others are there; a watch ends with it.
  bool needs(int peer, bool left_in_order) const;

  // A watch is a receive with the internal tag, of a message that nobody sends: it ends when its peer does.
  std::size_t watches() const { return watches_; }
  // The watches, taken out (to fail them); `peer` absent: of all peers. Takes no memory.
  std::list<Request> take_watches(std::optional<int> peer);
  const std::vector<std::unique_ptr<Channel>>& channels() const { return channels_; }

private:
  struct Header {
    std::uint32_t magic = 0;
    std::uint32_t tag = 0;
    std::uint64_t bytes = 0;
    DType dtype = DType::uint8;
    // To a cache line: copies of misaligned payload into the socket take twice the time (measured).
    std::uint8_t unused[47] = {};
  };
  static_assert(sizeof(Header) == 64);
  // That a GPU's memory may be read or written by an HCA: its stream has come so far.
  using Begun = std::shared_ptr<const std::atomic<bool>>;
  struct Sending {
    Request request;
    Header header;
    std::size_t done_bytes = 0;                  // header included
    std::unique_ptr<cuda::StagedSend> staged{};  // a GPU's memory
    Begun direct{};                              // or this, where it goes without host memory
  };
  struct Outgoing {
    std::array<iovec, max_pieces> pieces;
    std::size_t count = 0;
    bool is_lasting = false;
    bool is_staged = false;
    void add(iovec piece) { pieces[count++] = piece; }
  };
  // A message that is here, while it is copied to a GPU.
  struct Landing {
    Request request;
    std::unique_ptr<cuda::StagedRecv> staged;  // null where all of it came without host memory
    std::vector<std::byte> payload{};          // where it came before its receive was posted
    std::size_t fed_bytes = 0;                 // of that
    bool is_direct = false;                    // some of it an HCA wrote to the GPU
  };
  using Rings = std::map<int, std::shared_ptr<cuda::PinnedRing>>;  // by GPU
  // A message that came before its receive was posted, while another receive waits on the same peer.
  struct Unexpected {
    Header header;
    std::vector<std::byte> payload;
  };
  struct Peer {
    std::deque<Sending> sends;
    std::list<Request> receives;  // posted, in order
    std::deque<Unexpected> unexpected;
    // Bytes that came with others in one system call and are not looked at yet.
    std::vector<std::byte> ahead;
    std::size_t ahead_begin = 0;
    std::size_t ahead_end = 0;
    // The message that is arriving.
    Header header;
    std::size_t header_bytes = 0;
    std::optional<Request> target;  // what it is for, where that is known
    // Where its payload goes: through this, else into the target's host memory, else into `stray`.
    std::unique_ptr<cuda::StagedRecv> staged;
    Begun direct;                   // an HCA writes it to the GPU
    bool has_direct_bytes = false;  // and has written some of it
    std::vector<std::byte> stray;
    std::size_t payload_bytes = 0;
    std::list<Landing> landing;
    Rings send_rings, recv_rings;  // each made when first needed
    bool ended = false;            // see has_ended
    std::uint64_t sent_messages = 0;
    std::uint64_t arrived_messages = 0;
    bool is_arriving() const { return header_bytes > 0; }
    std::size_t ahead_bytes() const { return ahead_end - ahead_begin; }
    bool is_idle() const { return sends.empty() && receives.empty() && landing.empty() && !is_arriving(); }
    bool only_watches() const;
    // Lets go of what is pending.
    void clear();
  };

  void activate(int peer);
  bool send_to(int peer);
  // Whether a message is waited for that is not here yet.
  bool receives_any() const;
  Outgoing collect(int peer);
  bool went(int peer, std::size_t bytes);
  bool recv_from(int peer);
  bool recv_or_end(int peer);
  std::size_t read(int peer, std::byte* into, std::size_t bytes, bool is_lasting);
  Channel::ShortView view(int peer, std::size_t wanted);
  void keep_rest(const ShortMessage& message, std::size_t gone_bytes, Clock::time_point deadline);
  void match(int peer);
  void end_message(int peer);
  std::span<std::byte> next_space(Peer& state) const;
  // --- a GPU's memory (p2p_device.cpp) ---
  std::shared_ptr<cuda::PinnedRing> ring(Rings& rings, int device);
  std::unique_ptr<cuda::StagedRecv> stage_recv(int peer, const Request& request, std::size_t done_bytes = 0);
  Begun direct_for(int peer, const Request& request, std::size_t bytes);
  bool send_direct(int peer);
  std::size_t recv_direct(int peer);
  std::function<void()> waker();
  void fill_sends(Peer& state);
  bool land(int peer);
  // What a message that no receive is posted for takes in memory.
  static std::uint64_t held_bytes(const Header& header);
  void check_sizes(const Request& request, int peer, const Header& header) const;
  void finish(Request& request);
  // A receive, of a message of so many bytes.
  void finish(Request& request, int source, std::size_t bytes);
  // visit(request, done_bytes, staged): the last is null where the message is in host memory.
  template <typename Visit>
  void for_each_pending(Visit visit) const;

  Group& group_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::vector<Peer> peers_;
  std::list<Request> any_receives_;
  std::vector<int> active_;
  std::size_t pending_ = 0;
  std::size_t watches_ = 0;                       // of these
  std::vector<std::shared_ptr<Work>> taken_out_;  // empty, with room for all that is pending
  int wake_fd_;
  std::function<void()> wake_;          // as wake_fd_; made when first needed
  std::uint64_t unexpected_bytes_ = 0;  // held, or about to be
  std::uint64_t max_unexpected_bytes_;
};

}  // namespace holmes
