// NcclCommunicator: the Communicator for device memory, on NCCL, bound to the NICs of its profile.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "holmes/comm/part_communicator.hpp"
#include "holmes/nccl/choose.hpp"
#include "holmes/nccl/session.hpp"

namespace holmes {

struct NcclOptions {
  nccl::Profile profile{};
  nccl::Settings settings{};
  int device = 0;                            // GPU of this rank
  std::vector<std::string> package_paths{};  // libraries of Python packages, see nccl::stock_library
  std::string sysfs_root = default_sysfs_root();
  // Freed memory is nobody else's before its own stream gets there, as with torch's allocator: what runs on the
  // buffers' own stream then holds none of them.
  bool frees_in_stream_order = false;
};

// Beside NCCL's own connections it keeps a communicator for host memory: it carries the set-up, tells peers of an
// abort, and notices a lost peer at once.
class NcclCommunicator final : public Communicator {
public:
  NcclCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options, NcclOptions nccl_options)
      : NcclCommunicator(std::move(store), std::move(options), std::move(nccl_options), Heritage{}) {}
  ~NcclCommunicator() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const std::string& name() const override { return options_.name; }
  std::optional<int> device() const override { return nccl_options_.device; }

  WorkPtr all_reduce(Buffer data, ReduceOp op, CallOptions call) override;
  WorkPtr reduce_scatter(Buffer output, std::vector<Buffer> inputs, ReduceOp op, CallOptions call) override;
  WorkPtr all_gather(std::vector<Buffer> outputs, Buffer input, CallOptions call) override;
  WorkPtr broadcast(Buffer data, int root, CallOptions call) override;
  WorkPtr reduce(Buffer data, int root, ReduceOp op, CallOptions call) override;
  WorkPtr gather(std::vector<Buffer> outputs, Buffer input, int root, CallOptions call) override;
  WorkPtr scatter(Buffer output, std::vector<Buffer> inputs, int root, CallOptions call) override;
  WorkPtr all_to_all(std::vector<Buffer> outputs, std::vector<Buffer> inputs, CallOptions call) override;
  // As all_to_all of one array each, cut in equal parts on every rank: one call, where NCCL has it (2.28 and later).
  WorkPtr all_to_all_equal(Buffer output, Buffer input, CallOptions call);
  // Also the host waits: every rank's earlier operations on its stream are done.
  WorkPtr barrier(CallOptions call) override { return barrier_on(nullptr, call); }
  // As barrier, behind what `stream` (a CUstream) has.
  WorkPtr barrier_on(void* stream, CallOptions call);
  // NCCL has no tags: `tag` must be 0, and messages of a pair match in order.
  WorkPtr send(Buffer data, int peer, std::uint32_t tag, CallOptions call) override;
  WorkPtr recv(Buffer data, int peer, std::uint32_t tag, CallOptions call) override;
  // UsageError: NCCL cannot.
  WorkPtr recv_any(Buffer data, std::uint32_t tag, CallOptions call) override;
  // One NCCL group: one Work, returned for each call.
  std::vector<WorkPtr> batch(std::vector<P2pCall> calls, CallOptions call) override;
  // NCCL makes it from this one's connections, where it can on all ranks; else anew.
  std::shared_ptr<Communicator> split(int color, int key) override;
  // Collective over the ranks that are not in `excluded` (a new communicator of them, in the same order; this one
  // ends). Where nothing has failed and NCCL can (2.27 and later), from this communicator's connections; else anew.
  std::shared_ptr<NcclCommunicator> shrink(std::vector<int> excluded);

  // What this thread calls from here to end_group becomes one group of NCCL, which launches it together: no operation
  // waits for another of the group. Each call returns the group's Work.
  void start_group();
  bool has_open_group();
  WorkPtr end_group(CallOptions call);
  // Forgets what this thread's open group has; nothing of it has started.
  void abandon_group();

  void abort(const std::string& reason) override;
  bool is_dead() const override { return session_->is_dead(); }
  // Of the host-memory communicator; NCCL tells nothing of its own.
  std::vector<ConnectionInfo> connections() const override { return control_->connections(); }
  std::vector<CommunicatorRecord> flight_record() const override { return {session_->record()->record(Clock::now())}; }

  // Registers memory with NCCL (2.19 and later), which may then move it without copies; returns a handle. Local.
  void* register_buffer(const Buffer& buffer);
  void deregister_buffer(void* handle);
  // As register_buffer, of any memory of the GPU, symmetric: a window of NCCL (2.27 and later), which is collective
  // over the communicator and wants memory of NCCL's own (ncclMemAlloc), equally large on all ranks.
  void* register_memory(void* address, std::size_t bytes, bool is_symmetric);
  void deregister_memory(void* handle, bool is_symmetric);
  // NCCL's version, which library or image, the NICs asked for and why; one sentence.
  const std::string& description() const { return description_; }

private:
  using Enqueue = std::function<nccl::Result(nccl::Comm comm, nccl::Stream stream)>;
  struct OpenGroup {
    std::vector<Buffer> buffers;
    std::vector<Enqueue> parts;
    bool is_one_call = false;  // the only part is
    std::shared_ptr<nccl::NcclWork> work;
  };

  // What it is made of: of nothing, or of another one's connections in NCCL.
  struct Heritage {
    NcclCommunicator* parent = nullptr;
    std::vector<int> excluded{};  // a shrink: the ranks that are left out
    int color = -1, key = 0;      // a split, on which all ranks of the parent have agreed
    bool is_split() const { return color >= 0; }
  };
  NcclCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options, NcclOptions nccl_options,
                   const Heritage& heritage);
  // Whether it is so on every rank. Collective.
  bool all_agree(bool here, Clock::time_point deadline);
  bool inherit(const Heritage& heritage, Clock::time_point deadline);
  bool holds_buffers(const CallOptions& call) const { return call.async || !nccl_options_.frees_in_stream_order; }
  // `is_one_call`: `enqueue` makes one call of NCCL.
  WorkPtr run(const char* operation, std::vector<Buffer> buffers, const CallOptions& call, bool is_one_call,
              Enqueue enqueue);
  WorkPtr exchange(const char* operation, std::vector<std::pair<int, Buffer>> sends,
                   std::vector<std::pair<int, Buffer>> recvs, const CallOptions& call);
  int reduction(ReduceOp op, DType dtype, const CallOptions& call);
  void check(const char* what, const Buffer& buffer) const;
  void check_all(const char* what, const std::vector<Buffer>& buffers, DType dtype) const;
  static void check_equal_count(const char* operation, const Buffer& output, const Buffer& input);
  void check_rank(const char* what, int value) const;
  void watch_peers();

  std::shared_ptr<Store> store_;
  CommunicatorOptions options_;
  NcclOptions nccl_options_;
  std::shared_ptr<PartCommunicator> control_;
  std::shared_ptr<nccl::Session> session_;
  std::string description_;
  Buffer barrier_token_;
  std::map<std::pair<DType, double>, int> premultiplied_;  // reductions that were made
  std::map<std::thread::id, OpenGroup> open_groups_;
  std::atomic<int> open_group_count_{0};
  std::mutex mutex_;  // protects what is neither set once nor atomic
  int splits_ = 0;
  int shrinks_ = 0;
};

// As make_communicator, for device memory.
std::shared_ptr<NcclCommunicator> make_nccl_communicator(std::shared_ptr<Store> store, CommunicatorOptions options,
                                                         NcclOptions nccl_options);

}  // namespace holmes
