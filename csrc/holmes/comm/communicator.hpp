// Communicator: the one interface. Backends implement it and nothing else.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "holmes/bootstrap/store.hpp"
#include "holmes/core/connection_info.hpp"
#include "holmes/core/options.hpp"
#include "holmes/core/types.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

struct CommunicatorRecord;
using WorkPtr = std::shared_ptr<Work>;

// A send or a receive of a batch.
struct P2pCall {
  bool is_send = true;
  Buffer buffer;
  int peer = 0;
  std::uint32_t tag = 0;
};

// A group of ranks bound to their NICs.
//
// Order: every rank calls the same collectives in the same order; sends and receives match per pair and tag, in order,
// and are independent of the collectives.
//   right:  rank 0: all_reduce(a), all_reduce(b)    rank 1: all_reduce(a), all_reduce(b)
//   wrong:  rank 0: all_reduce(a), all_gather(b)    rank 1: all_gather(b), all_reduce(a)   -> MismatchError on all
//   ranks
// On device memory a call only puts the operation on the device: it runs after what the buffers' stream has before it,
// and a synchronous call returns at once, what is put on that stream later running after it (Work::join).
// Sends and receives of a communicator for host memory take a GPU's memory too: they begin after what its stream has,
// and waiting for them, also by a stream, blocks the host.
// A collective is complete on a rank when its result is there and every rank has entered it.
// Every call returns a Work; with CallOptions::async false it is final on return. Bad arguments throw UsageError from
// the call itself and leave the communicator usable; every other error makes the communicator dead: it says so in each
// later call. Input and output may be the same memory where a method says so and must not overlap otherwise;
// outputs never overlap each other.
// Thread-safe: calls of several threads are put in some order.
class Communicator {
public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  // Number of the GPU whose memory it moves; absent: host memory.
  virtual std::optional<int> device() const { return std::nullopt; }
  // Whether synchronous calls heed CallOptions::held.
  virtual bool lets_go() const { return false; }

  // In place: `data` (count equal on all ranks) becomes the reduction over all ranks, bit-identical on all of them.
  virtual WorkPtr all_reduce(Buffer data, ReduceOp op, CallOptions call = {}) = 0;
  // `inputs[r]` goes to rank r, reduced over all ranks; this rank's lands in `output` (count = inputs[rank].count).
  // inputs[r].count may differ between r, but is the same on all ranks. `output` may be `inputs[rank]`.
  virtual WorkPtr reduce_scatter(Buffer output, std::vector<Buffer> inputs, ReduceOp op, CallOptions call = {}) = 0;
  // `outputs[r]` becomes rank r's `input`. Counts may differ between ranks. `input` may be `outputs[rank]`.
  virtual WorkPtr all_gather(std::vector<Buffer> outputs, Buffer input, CallOptions call = {}) = 0;
  // In place on every rank but the root.
  virtual WorkPtr broadcast(Buffer data, int root, CallOptions call = {}) = 0;
  // `data` of the root becomes the reduction; the other ranks' is unchanged.
  virtual WorkPtr reduce(Buffer data, int root, ReduceOp op, CallOptions call = {}) = 0;
  // `outputs` is used on the root only: one buffer per rank. `input` may be `outputs[root]`.
  virtual WorkPtr gather(std::vector<Buffer> outputs, Buffer input, int root, CallOptions call = {}) = 0;
  // `inputs` is used on the root only: one buffer per rank. `output` may be `inputs[root]`.
  virtual WorkPtr scatter(Buffer output, std::vector<Buffer> inputs, int root, CallOptions call = {}) = 0;
  // `outputs[r]` becomes what rank r has in its inputs[this rank]; counts may all differ but must agree pairwise.
  // outputs[rank] may be inputs[rank].
  virtual WorkPtr all_to_all(std::vector<Buffer> outputs, std::vector<Buffer> inputs, CallOptions call = {}) = 0;
  virtual WorkPtr barrier(CallOptions call = {}) = 0;

  // A send is complete when its buffer may be reused, a receive when the message is there.
  virtual WorkPtr send(Buffer data, int peer, std::uint32_t tag = 0, CallOptions call = {}) = 0;
  virtual WorkPtr recv(Buffer data, int peer, std::uint32_t tag = 0, CallOptions call = {}) = 0;
  // From whoever sends a message with this tag first; Work::source_rank tells who.
  virtual WorkPtr recv_any(Buffer data, std::uint32_t tag = 0, CallOptions call = {}) = 0;
  // All at once, no order between them: complete when all are.
  virtual std::vector<WorkPtr> batch(std::vector<P2pCall> calls, CallOptions call = {}) = 0;

  // Collective. Ranks of equal `color` (>= 0) form a communicator, ordered by (key, rank); color -1 gets null.
  virtual std::shared_ptr<Communicator> split(int color, int key) = 0;

  // Local, from any thread, never blocks: every pending and later operation fails with AbortedError, here and (told by
  // a control message) on the peers.
  virtual void abort(const std::string& reason) = 0;
  virtual bool is_dead() const = 0;
  virtual std::vector<ConnectionInfo> connections() const = 0;
  // Its last operations and what it waits for; one for each communicator that it is made of. Local, takes some
  // milliseconds while operations run.
  virtual std::vector<CommunicatorRecord> flight_record() const = 0;
};

// Collective over the `size` ranks that share `store`: connects them over the given NICs and returns when all are
// connected. Throws NicError (interface missing, down, address not on it), UnreachableError (naming the peer, its host
// and both addresses), ProtocolError (wrong secret or version), TimeoutError.
std::shared_ptr<Communicator> make_communicator(std::shared_ptr<Store> store, CommunicatorOptions options);

// Local. Waits until nothing of `communicator` is pending, it is dead, or nothing has moved for `max_silence`.
void drain(Communicator& communicator, Duration max_silence);

// What a split makes. Collective over `comm`, which was made with `options`: the options of the communicator that this
// rank's color gets, or nothing for color -1. `number` counts the splits of `comm`. Throws UsageError for other
// negative colors.
std::optional<CommunicatorOptions> split_options(Communicator& comm, const CommunicatorOptions& options, int number,
                                                 int color, int key);

// Throws UsageError naming the buffers where an output shares memory with another output or with an input. What
// `own_output` and `own_input` (indices) name may be the same memory, all of it. Costs a few nanoseconds a buffer.
void check_apart(const char* operation, std::span<const Buffer> outputs, std::size_t own_output,
                 std::span<const Buffer> inputs, std::size_t own_input);

}  // namespace holmes
