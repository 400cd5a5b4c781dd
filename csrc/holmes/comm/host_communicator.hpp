// HostCommunicator: the Communicator for host memory, over TCP and shared memory. Which of them, and over which NICs,
// is chosen per pair of ranks. Sends and receives also take a GPU's memory, which the copy engine moves to and from
// page-locked memory; then what comes later on any stream sees a finished operation's result.
#pragma once

#include <atomic>

#include "holmes/collectives/choose.hpp"
#include "holmes/comm/arguments.hpp"
#include "holmes/comm/part_communicator.hpp"
#include "holmes/engine/engine.hpp"

namespace holmes {

class HostCommunicator final : public PartCommunicator {
public:
  // `whole`: of the wide group that it is a row or a column of.
  HostCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options,
                   std::shared_ptr<WholeProgress> whole = nullptr);
  ~HostCommunicator() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const std::string& name() const override { return options_.name; }
  bool lets_go() const override { return true; }

  WorkPtr all_reduce(Buffer data, ReduceOp op, CallOptions call) override;
  WorkPtr reduce_scatter(Buffer output, std::vector<Buffer> inputs, ReduceOp op, CallOptions call) override;
  WorkPtr all_gather(std::vector<Buffer> outputs, Buffer input, CallOptions call) override;
  WorkPtr broadcast(Buffer data, int root, CallOptions call) override;
  WorkPtr reduce(Buffer data, int root, ReduceOp op, CallOptions call) override;
  WorkPtr gather(std::vector<Buffer> outputs, Buffer input, int root, CallOptions call) override;
  WorkPtr scatter(Buffer output, std::vector<Buffer> inputs, int root, CallOptions call) override;
  WorkPtr all_to_all(std::vector<Buffer> outputs, std::vector<Buffer> inputs, CallOptions call) override;
  WorkPtr barrier(CallOptions call) override;
  WorkPtr send(Buffer data, int peer, std::uint32_t tag, CallOptions call) override;
  WorkPtr recv(Buffer data, int peer, std::uint32_t tag, CallOptions call) override;
  WorkPtr recv_any(Buffer data, std::uint32_t tag, CallOptions call) override;
  std::vector<WorkPtr> batch(std::vector<P2pCall> calls, CallOptions call) override;
  std::shared_ptr<Communicator> split(int color, int key) override;
  void abort(const std::string& reason) override { engine_->abort(reason); }
  bool is_dead() const override { return engine_->is_dead() || engine_->is_inherited(); }
  std::vector<ConnectionInfo> connections() const override { return engine_->connections(); }
  std::vector<CommunicatorRecord> flight_record() const override;

  // As recv, into host memory, of a message that may be shorter than `data`. `received_bytes` holds its size once the
  // work is completed.
  WorkPtr recv_up_to(Buffer data, int peer, std::uint32_t tag, std::shared_ptr<std::size_t> received_bytes,
                     CallOptions call);

  // For a caller that asks again and again and never waits: from now on its asynchronous operations go on in its calls
  // of `poll`, and in no other thread. Before the first one.
  void set_polled() { engine_->driver().set_polled(); }
  void poll() { engine_->driver().poll(); }

  // --- for communicators made of others ---
  WorkPtr announce(const Signature& signature, CallOptions call) override;
  // Does not run callbacks in the calling thread.
  void fail(const Failure& failure) override { engine_->fail_in_background(failure); }
  std::optional<Failure> failure() const override { return engine_->failure(); }
  Failure abort_failure(const std::string& reason) const override { return engine_->abort_failure(reason); }
  void watch_peers(const std::function<void(const Failure&)>& told) override;
  bool has_left_rdma() const override { return has_left_rdma_; }
  bool is_far() const override;
  bool broadcasts_along_tree(std::size_t bytes) const override;
  // What messages call a rank.
  int label(int rank) const { return label_of(options_, rank); }
  // Throws UsageError in a forked child.
  void check_usable() const { engine_->throw_if_inherited(); }
  // From time to time, where nothing may be under way: ends as a peer tells it to. Returns what there is to say of
  // peers that are gone without having said so. Does nothing where another thread drives it.
  std::vector<Failure> look_at_peers() { return engine_->look_at_peers(); }

private:
  void introduce(const Mesh& mesh, std::size_t slice_bytes);
  struct Call;
  Call begin(const CallOptions& options, Clock::time_point submitted = Clock::now()) const;
  // Where it is short, and nothing else is under way: carries it out (see ShortCall). `pair_bytes`: the most
  // between two ranks; `fill(called)` sets what goes where; `make(call)` makes the collective that it goes on as.
  // Null: it has done nothing.
  template <typename Fill, typename Make>
  WorkPtr run_short(const Signature& signature, std::size_t pair_bytes, const CallOptions& options, const Fill& fill,
                    const Make& make);
  template <typename Fill, typename Make>
  WorkPtr run_short(ShortForm form, const Signature& signature, const CallOptions& options, const Fill& fill,
                    const Make& make);
  template <typename Fill, typename Make>
  WorkPtr run_short(ShortCall&& called, const CallOptions& options, const Fill& fill, const Make& make);
  // As run_short, or else as any other.
  template <typename Fill, typename Make>
  WorkPtr run(const Signature& signature, std::size_t pair_bytes, const CallOptions& options, const Fill& fill,
              const Make& make);
  // Of an operation whose result is the same on all ranks: every so many are compared.
  Call begin_alike(const CallOptions& options);
  WorkPtr finish(Call call, std::unique_ptr<Collective> collective);
  WorkPtr finish_alike(Call call, const Signature& signature, std::unique_ptr<Collective> collective,
                       std::vector<Buffer> result);
  // As many as can be carried out at once, where this rank waits for all of them; `works` gets the ended ones, each in
  // its call's place. Returns how many.
  std::size_t run_short(std::span<const P2pCall> calls, const CallOptions& options, std::span<WorkPtr> works);
  WorkPtr message(P2pCall call, const CallOptions& options);
  std::vector<WorkPtr> finish_p2p(std::vector<P2pEngine::Request> requests, const CallOptions& call);
  WorkPtr exchange(const Signature& signature, std::vector<Buffer> sends, std::vector<Buffer> recvs,
                   const CallOptions& options);
  P2pEngine::Request request(bool is_send, Buffer buffer, std::optional<int> peer, std::uint32_t tag,
                             const CallOptions& call, Clock::time_point submitted = Clock::now()) const;
  std::size_t own() const { return static_cast<std::size_t>(options_.rank); }

  std::shared_ptr<Store> store_;
  CommunicatorOptions options_;
  const Arguments arguments_{options_};
  std::shared_ptr<Engine> engine_;
  std::string own_place_;  // "rank 0 (host a) on NIC eth0"
  bool has_left_rdma_ = false;
  int splits_ = 0;
  std::uint64_t digest_every_ = 0;  // 0: none
  std::atomic<std::uint64_t> alike_count_{0};
};

}  // namespace holmes
