// Collective: one collective operation as a state machine over the channels to all peers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "holmes/collectives/collective_header.hpp"
#include "holmes/collectives/copy_call.hpp"
#include "holmes/collectives/owed_headers.hpp"
#include "holmes/collectives/pace.hpp"
#include "holmes/core/types.hpp"
#include "holmes/core/work.hpp"
#include "holmes/group/group.hpp"
#include "holmes/record/communicator_record.hpp"
#include "holmes/transport/shared_buffer.hpp"

namespace holmes {

// Whether all of it is in one shared buffer, or it is empty.
inline bool is_shared(const Buffer& data) {
  return data.bytes() == 0 || SharedBuffer::place_of(data.data, data.bytes()).id != 0;
}

// Memory that operations read or write.
class Touched {
public:
  void add(const Buffer& buffer) {
    if (buffer.bytes() > 0) pieces_.emplace_back(buffer.begin(), buffer.bytes());
  }
  void add(std::span<const Buffer> buffers) {
    for (const Buffer& buffer : buffers) add(buffer);
  }
  void clear() { pieces_.clear(); }
  std::size_t size() const { return pieces_.size(); }
  // Whether a piece after the first `size` shares memory with one of these.
  bool overlaps_from(std::size_t size) const;

private:
  std::vector<std::span<const std::byte>> pieces_;
};

class Collective {
public:
  Collective(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline);
  virtual ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // Called once, when the operation becomes the running one.
  virtual void start() {}
  // Before it is started: so much of what this rank sends, by rank, has gone already (see ShortCall).
  void set_gone(std::vector<std::size_t> gone_bytes) { gone_bytes_ = std::move(gone_bytes); }
  // Moves what can be moved without blocking. Returns whether anything moved. Throws StreamClosed, MismatchError, ...
  bool advance();
  bool is_done() const;
  // Where another one is running that has sent all and only receives yet: sends what can be sent. Their streams follow
  // each other, so on a far path the round trip is paid once for all that is queued. Throws StreamClosed.
  bool send_ahead();
  bool has_sent_all() const { return prepared_ && open_sends_ == 0; }
  // Appends the memory that it reads or writes. False where it cannot tell: then nothing is sent ahead.
  virtual bool append_touched(Touched& /*touched*/) const { return false; }
  // Whether this rank's part is done, and all that is missing are headers that nothing follows; only where operations
  // end so (CommunicatorOptions::local_completion). What a mismatch is, those headers tell later.
  bool is_done_here() const;
  void append_owed(OwedHeaders& owed) const;
  // Called once, when it is done.
  void end();
  // What to wait for before calling advance again: bytes that can be received next / sent next without a break, 0 for
  // none, and 1 where a header is due.
  std::size_t awaited_recv_bytes(int peer);
  std::size_t awaited_send_bytes(int peer);
  // Payload bytes that this rank sends, to all peers together.
  std::size_t send_bytes() const;
  // Whether bytes to or from `peer` are missing yet.
  bool involves(int peer) const;
  // "rank 2 (host b0) on NIC eth0 has not entered it; rank 3 ...: 12 of 4096 bytes received": whom it waits for.
  // `entered[r]`: rank r said that it has entered it, and may wait for others itself.
  std::string describe_wait(const std::vector<char>& entered) const;
  // With whom bytes are missing, and how many.
  std::vector<PeerProgress> progress() const;
  RecordedCall recorded_call() const;
  // Its number in the flight recorder.
  std::uint64_t record() const { return record_; }
  void set_record(std::uint64_t record) { record_ = record; }
  // "all_reduce #17 (float32, sum) of communicator 'dp0'".
  std::string describe() const;

  Work& work() const { return *work_; }
  const std::shared_ptr<Work>& shared_work() const { return work_; }
  Clock::time_point deadline() const { return deadline_; }
  std::uint64_t sequence() const { return signature_.sequence; }
  // The number of the wide group's operation that it is a step of.
  std::optional<std::uint64_t> whole_number() const {
    return group_.whole && signature_.whole ? std::optional(signature_.whole->number) : std::nullopt;
  }
  void set_sequence(std::uint64_t sequence) { signature_.sequence = sequence; }

protected:
  // Whether anything, the header at least, goes to / comes from `peer`; it says the same of the other direction.
  // Where it may end early, only the root is heard, which all others are compared with.
  virtual bool sends_to(int peer) const {
    return !ends_early_ || signature_.root == group_.rank || signature_.root == peer;
  }
  virtual bool receives_from(int peer) const { return sends_to(peer); }
  // Whether it may end before all headers are there, where the communicator's operations do. Asked once it is known
  // whether the ranks vote.
  virtual bool may_end_early() const { return false; }
  // Whether the header may go to `peer` already.
  virtual bool may_send(int /*peer*/) const { return true; }
  // Flows that share links get equal parts of them where they go at one pace.
  virtual Pacing pacing() const { return Pacing::none; }
  // Payload bytes that go to / come from `peer` in total.
  virtual std::size_t send_total_bytes(int peer) const = 0;
  virtual std::size_t recv_total_bytes(int peer) const = 0;
  // The next contiguous bytes, given how many are done; empty where none can move now.
  virtual iovec next_send(int peer, std::size_t done_bytes) = 0;
  virtual iovec next_recv(int peer, std::size_t done_bytes) = 0;
  // Local work between the transfers. Returns whether anything was done.
  virtual bool compute() { return false; }
  // When that has its turn in a round.
  enum class ComputeTurn { first, after_receiving, when_idle };
  virtual ComputeTurn compute_turn() const { return ComputeTurn::after_receiving; }
  // Whether local work is finished too.
  virtual bool is_computed() const { return true; }
  // Bytes of the operation, as all ranks know them alike; 0: they do not. Then channels decide how pieces are copied,
  // as they do where not all of them are shared memory.
  virtual std::size_t agreed_bytes() const { return 0; }
  // Whether all that this rank sends is in shared buffers (see SharedBuffer), or it sends nothing. Asked where there
  // are agreed bytes.
  virtual bool sends_shared() const { return false; }
  // Whether compute() waits to peek at bytes of `peer`.
  virtual bool awaits_peek(int /*peer*/) const { return false; }

  std::size_t received_bytes(int peer) const;
  std::size_t sent_bytes(int peer) const;
  void count_received(int peer, std::size_t bytes);  // for peeked bytes
  bool header_received(int peer) const;
  // How it is copied, as all ranks decided; known once payload is asked for.
  CopyWay copy_way() const { return copies_.way(); }

  Group& group_;
  Signature signature_;

private:
  bool is_lasting(int peer, const iovec& piece) const;
  iovec next_paced_send(int peer);
  bool send_to(int peer);
  std::size_t send(int peer, std::span<const iovec> pieces, bool lasts);
  bool recv_from(int peer);

  struct Flow {
    CollectiveHeader out;
    CollectiveHeader in;
    std::size_t out_bytes = 0;  // header included
    std::size_t in_bytes = 0;
    std::size_t out_total = 0;
    std::size_t in_total = 0;
  };
  void prepare();
  bool is_worth(Pacing pacing) const;
  void update_pace();
  bool all_headers_received() const;

  std::shared_ptr<Work> work_;
  Clock::time_point deadline_;
  std::uint64_t record_ = 0;
  std::vector<Flow> flows_;
  int open_flows_ = 0;  // directions that are not finished
  int open_sends_ = 0;  // of these
  bool prepared_ = false;
  std::vector<std::size_t> gone_bytes_;  // empty: nothing
  bool ends_early_ = false;
  CopyCall copies_;
  Pace pace_;
};

}  // namespace holmes
