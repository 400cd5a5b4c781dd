// WideCommunicator: the Communicator for a group of many ranks. Each rank is connected with those of its row and its
// column alone, or of rows and columns of these where they are large; every operation goes over them.
#pragma once

#include "holmes/comm/arguments.hpp"
#include "holmes/comm/pair_connections.hpp"
#include "holmes/comm/peer_watch.hpp"
#include "holmes/comm/wide_steps.hpp"

namespace holmes {

// Collectives run one after the other. A failure in one part ends all parts of a rank, so that all ranks hear of it.
// Other ranks are connected when they first send to and receive from each other; nothing is received from just anyone
// (recv_any), and operations end when every rank has entered them.
class WideCommunicator final : public PartCommunicator {
public:
  // Whether a group is to be one: options.wide_min_ranks, and no local completion.
  static bool is_for(const CommunicatorOptions& options);
  // Collective.
  WideCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options);
  ~WideCommunicator() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const std::string& name() const override { return options_.name; }

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
  // Throws UsageError.
  WorkPtr recv_any(Buffer data, std::uint32_t tag, CallOptions call) override;
  std::vector<WorkPtr> batch(std::vector<P2pCall> calls, CallOptions call) override;
  std::shared_ptr<Communicator> split(int color, int key) override;
  void abort(const std::string& reason) override;
  bool is_dead() const override;
  std::vector<ConnectionInfo> connections() const override;
  std::vector<CommunicatorRecord> flight_record() const override;
  WorkPtr announce(const Signature& signature, CallOptions call) override;
  void fail(const Failure& failure) override;
  std::optional<Failure> failure() const override;
  Failure abort_failure(const std::string& reason) const override;
  void watch_peers(const std::function<void(const Failure&)>& told) override;
  bool has_left_rdma() const override { return false; }  // its rows and columns know, each of itself
  bool is_far() const override { return true; }
  bool broadcasts_along_tree(std::size_t /*bytes*/) const override { return false; }

private:
  class Body;  // what outlives the communicator where operations are pending

  void connect_parts();
  // One after the other: first the row, then the columns.
  void connect(WideParts& parts, const std::string& name, const std::shared_ptr<Store>& store);
  // `members`: numbers of its ranks in the whole.
  void connect(WidePart& part, const std::string& name, const std::vector<int>& members, int rank,
               const std::shared_ptr<Store>& store);
  void tell_ranks_with_a_mesh();
  // Of the set-up.
  void give_up(const Failure& failure);
  // Throws where it is dead, or belongs to another process.
  void check_usable(const CallOptions& call) const;
  // `make(steps)` makes the operation's.
  template <typename Make>
  WorkPtr start(WholeCall whole, std::size_t count, const CallOptions& call, const Make& make);
  std::vector<WorkPtr> start_p2p(std::vector<P2pCall> calls, const CallOptions& call);

  std::shared_ptr<Store> store_;
  CommunicatorOptions options_;
  const Arguments arguments_{options_};
  std::shared_ptr<Body> body_;
  int splits_ = 0;
};

}  // namespace holmes
