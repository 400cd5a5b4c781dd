#include "holmes/comm/hierarchical_communicator.hpp"

#include <algorithm>

#include "holmes/bootstrap/nic_agreement.hpp"
#include "holmes/comm/communicator.hpp"
#include "holmes/comm/hierarchy.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/record/communicator_record.hpp"

namespace holmes {
namespace {

// The parts' deadlines come after the announcement's: only that one sees all ranks and can name who is missing, where a
// part may blame a rank that waits itself. Longer than a probe (failure_detector.cpp), and than it takes until the
// first step of a wide announcement names a rank that answers nothing.
constexpr auto part_grace = std::chrono::milliseconds(2500);

// What is measured is an all_reduce; a flat all_gather of few bytes moves less, each block once to each rank. (Two
// clusters of three ranks, an uplink of 0.1 Gbit/s: flat 0.18 and hierarchical 0.32 ms of 1 KiB.)
constexpr std::uint64_t least_measured_gather_bytes = 4096;

// Of an operation of several communicators.
class StagedWork final : public Work {
public:
  StagedWork(std::weak_ptr<StageScheduler> scheduler, std::weak_ptr<HierarchicalParts> parts)
      : scheduler_(std::move(scheduler)), parts_(std::move(parts)) {}

private:
  void abandon(const std::string& reason) override {
    const auto scheduler = scheduler_.lock();
    const auto parts = parts_.lock();
    if (scheduler && parts) scheduler->fail(parts->flat->abort_failure(reason));
  }

  std::weak_ptr<StageScheduler> scheduler_;
  std::weak_ptr<HierarchicalParts> parts_;
};

Form form_of(const Crossing& crossing) {
  if (!crossing.compression || crossing.kept.is_first) return Form::hierarchical;
  const auto codec = static_cast<std::uint8_t>(crossing.compression->codec());
  return static_cast<Form>(codec | (crossing.kept.reference ? form_of_differences : 0));
}

// How an operation is compressed: as its call says, or else as its thread does where that can be. Null: not at all.
// `op`: of a reduction. Throws UsageError where the call says what cannot be.
std::shared_ptr<Compression> compression_of(const CallOptions& call, DType dtype, std::optional<ReduceOp> op = {}) {
  const auto& compression = call.compression ? call.compression : thread_compression();
  if (!compression) return nullptr;
  if (dtype == DType::float32 && (!op || *op == ReduceOp::sum || *op == ReduceOp::avg)) return compression;
  if (!call.compression) return nullptr;
  throw UsageError("compression is for float32, of reductions for sums and averages, not for " +
                   (op ? std::string(holmes::name(*op)) + " of " : "") + std::string(holmes::name(dtype)) +
                   "; leave it out");
}

}  // namespace

HierarchicalCommunicator::HierarchicalCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options)
    : store_(std::move(store)), options_(std::move(options)) {
  parts_ =
      std::make_shared<HierarchicalParts>(HierarchicalParts{.hierarchy = Hierarchy(options_.clusters, options_.rank)});
  scheduler_ = std::make_shared<StageScheduler>([parts = parts_](const Failure& failure) { parts->fail(failure); });
  try {
    connect_parts();
    choose_min_bytes();
  } catch (const HolmesError& error) {
    parts_->fail(failure_of(error));  // what fails in one cluster is heard of in all, not that this rank has left
    throw;
  }
}

void HierarchicalCommunicator::connect_parts() {
  const Hierarchy& at = parts_->hierarchy;
  // The communicator over `nics` of `members`, in which this rank is number `rank`. Its messages speak of this one's
  // ranks.
  const auto connect = [&](const std::string& suffix, const std::vector<int>& members, int rank,
                           const std::vector<NicBinding>& nics) {
    CommunicatorOptions part = part_options(options_, options_.name + suffix, members, rank);
    // Its members are of one cluster, or each of another.
    part.between_clusters = part.clusters.front() != part.clusters.back();
    part.clusters.clear();
    part.cluster_nics.clear();
    part.nics = nics;
    if (*part.between_clusters) keep_from_rdma(part);
    if (part.tls == TlsMode::clusters) part.tls = *part.between_clusters ? TlsMode::all : TlsMode::off;
    return make_part(store_, std::move(part));
  };
  parts_->flat = make_part(store_, options_);
  if (parts_->flat->has_left_rdma()) options_.rdma_ports.clear();  // as all of its cluster
  // A rank whose cluster is connected waits until all are, and hears of what fails in another one.
  const auto await_all = [&] {
    CallOptions call;
    call.timeout = options_.connect_timeout;
    parts_->flat->barrier(call)->wait();
  };
  const std::string cluster = std::to_string(at.cluster());
  const auto& inside = options_.cluster_nics.empty() ? options_.nics : options_.cluster_nics;
  parts_->scatter = connect("/cluster" + cluster + ".scatter", at.members(), at.index(), inside);
  parts_->gather = connect("/cluster" + cluster + ".gather", at.members(), at.index(), inside);
  await_all();
  if (at.owns_share())
    parts_->cross = connect("/cross" + std::to_string(at.index()), at.counterparts(), at.cluster(), options_.nics);
  await_all();
}

void HierarchicalCommunicator::choose_min_bytes() {
  const auto given = agree_given_bytes(*parts_->flat, options_.hierarchical_min_bytes);
  CallOptions call;
  call.timeout = options_.connect_timeout;
  // What is measured is of no tensor of the caller's, who may say how his are compressed.
  const ThreadCompression none(nullptr);
  min_bytes_ = given ? *given
                     : measure_hierarchical_min_bytes(
                           *parts_->flat, [&](const Buffer& data) { all_reduce(data, ReduceOp::sum, call)->wait(); },
                           options_.connect_timeout);
  const auto& hierarchy = parts_->hierarchy;
  min_gather_bytes_ = given ? min_bytes_ : std::max(min_bytes_, least_measured_gather_bytes);
  log(LogLevel::info, options_.rank,
      "communicator '" + options_.name + "' spans " + std::to_string(hierarchy.cluster_count()) +
          " clusters (this rank is number " + std::to_string(hierarchy.index()) + " of " +
          std::to_string(hierarchy.members().size()) + " in cluster " + std::to_string(hierarchy.cluster()) +
          "); operations are hierarchical " +
          (min_bytes_ == never_hierarchical ? "never" : "from " + std::to_string(min_bytes_) + " bytes on") +
          (given ? ", as told" : ", as measured"));
}

HierarchicalCommunicator::~HierarchicalCommunicator() {
  // A failure of the flat part is the reason why all of them end.
  if (auto failure = parts_->flat->failure()) {
    scheduler_->fail(std::move(*failure));
  } else if (scheduler_->has_pending()) {
    scheduler_->fail(failure_or(ErrorKind::aborted, [this] {
      return parts_->flat->abort_failure("it was destroyed with operations pending");
    }));
  }
}

PartCommunicator& HierarchicalCommunicator::flat() const {
  scheduler_->throw_if_failed(options_.name);
  return *parts_->flat;
}

template <typename Make>
WorkPtr HierarchicalCommunicator::start(Signature signature, std::uint64_t bytes, const CallOptions& call,
                                        const Make& make, Form form) {
  scheduler_->throw_if_failed(options_.name);
  const Duration timeout = call.timeout.value_or(options_.timeout);
  signature.form = form;
  signature.announced_bytes = bytes;
  signature.count = bytes / size_bytes(signature.dtype);
  const auto deadline = Clock::now() + timeout + part_grace;
  const auto announcing = [&](bool waits) {
    return [&, waits]() -> std::vector<WorkPtr> {
      const WorkPtr work = parts_->flat->announce(signature, {.timeout = timeout, .async = !waits});
      if (!call.async) work->mark_awaited();  // for diagnosis: the caller waits for the whole
      return {work};
    };
  };
  std::string title = std::string(holmes::name(signature.op)) + " of " + std::to_string(bytes) +
                      " bytes on communicator '" + options_.name + "'";
  const auto work = std::make_shared<StagedWork>(scheduler_, parts_);
  // Of one piece nothing overlaps. (On a far path the announcement is under way with it.)
  if (!call.async && is_one_piece(bytes)) {
    const auto chain = make(HierarchicalChains(parts_, deadline, /*waits=*/true)).front();
    try {
      if (scheduler_->run_alone(title, announcing(!parts_->flat->is_far()), chain, *work)) return work;
    } catch (const Interrupted& interrupted) {
      scheduler_->fail(parts_->flat->abort_failure(std::string("it was interrupted by ") + interrupted.what()));
      throw;
    }
  }
  scheduler_->start(std::move(title), announcing(/*waits=*/false),
                    make(HierarchicalChains(parts_, deadline, /*waits=*/false)), work);
  if (!call.async) work->await_final();  // the caller's wait raises
  return work;
}

template <typename Make>
WorkPtr HierarchicalCommunicator::start_crossing(Signature signature, std::uint64_t bytes, const CallOptions& call,
                                                 const std::shared_ptr<Compression>& compression, std::size_t share,
                                                 std::size_t reference_count, const Make& make) {
  Crossing crossing{.compression = compression};
  // Acquired for as long as a chain has it.
  if (compression)
    crossing.kept =
        Compression::acquire(compression, bytes / size_bytes(signature.dtype), share, reference_count, parts_);
  const Form form = form_of(crossing);
  return start(
      std::move(signature), bytes, call, [&](const HierarchicalChains& chains) { return make(chains, crossing); },
      form);
}

bool HierarchicalCommunicator::takes_blocks(const std::vector<Buffer>& blocks, const Buffer& own,
                                            std::uint64_t min_bytes) const {
  if (blocks.size() != static_cast<std::size_t>(options_.size) || total_bytes(blocks) < min_bytes) return false;
  return blocks[static_cast<std::size_t>(options_.rank)].count == own.count &&
         std::ranges::all_of(blocks, [&](const Buffer& block) { return block.dtype == own.dtype; }) &&
         (is_even(blocks) || parts_->hierarchy.saves_crossings(blocks));
}

bool HierarchicalCommunicator::is_even(const std::vector<Buffer>& blocks) const {
  return parts_->hierarchy.has_equal_clusters() &&
         std::ranges::all_of(blocks, [&](const Buffer& block) { return block.count == blocks.front().count; });
}

WorkPtr HierarchicalCommunicator::all_reduce(Buffer data, ReduceOp op, CallOptions call) {
  check_reduction(data.dtype, op);
  const auto compression = compression_of(call, data.dtype, op);
  call.compression.reset();
  if (data.bytes() < min_bytes_) return flat().all_reduce(std::move(data), op, std::move(call));
  const Signature signature{.op = OpCode::all_reduce,
                            .dtype = data.dtype,
                            .reduction = op,
                            .root = {},
                            .counts_digest = digest_in_list(0, call.in_list)};
  return start_crossing(signature, data.bytes(), call, compression,
                        HierarchicalChains(parts_, {}, false).crossing_count(data), 0,
                        [&](const HierarchicalChains& chains, const Crossing& crossing) {
                          return chains.all_reduce(data, op, crossing);
                        });
}

WorkPtr HierarchicalCommunicator::reduce_scatter(Buffer output, std::vector<Buffer> inputs, ReduceOp op,
                                                 CallOptions call) {
  check_reduction(output.dtype, op);
  auto compression = compression_of(call, output.dtype, op);
  call.compression.reset();
  if (!takes_blocks(inputs, output, min_bytes_))
    return flat().reduce_scatter(std::move(output), std::move(inputs), op, std::move(call));
  check_apart("reduce_scatter", {&output, 1}, 0, inputs, static_cast<std::size_t>(options_.rank));
  const Signature signature{.op = OpCode::reduce_scatter,
                            .dtype = output.dtype,
                            .reduction = op,
                            .root = {},
                            .counts_digest = digest_in_list(digest_of_counts(inputs), call.in_list)};
  if (!is_even(inputs)) compression.reset();
  const auto others = static_cast<std::size_t>(parts_->hierarchy.cluster_count() - 1);
  return start_crossing(signature, total_bytes(inputs), call, compression, others * output.count, 0,
                        [&](const HierarchicalChains& chains, const Crossing& crossing) {
                          return chains.reduce_scatter(output, inputs, op, crossing);
                        });
}

WorkPtr HierarchicalCommunicator::all_gather(std::vector<Buffer> outputs, Buffer input, CallOptions call) {
  auto compression = compression_of(call, input.dtype);
  call.compression.reset();
  if (!takes_blocks(outputs, input, min_gather_bytes_))
    return flat().all_gather(std::move(outputs), std::move(input), std::move(call));
  check_apart("all_gather", outputs, static_cast<std::size_t>(options_.rank), {&input, 1}, 0);
  const Signature signature{.op = call.told_as,
                            .dtype = input.dtype,
                            .reduction = {},
                            .root = {},
                            .counts_digest = digest_in_list(digest_of_counts(outputs), call.in_list)};
  if (!is_even(outputs)) compression.reset();
  const auto clusters = static_cast<std::size_t>(parts_->hierarchy.cluster_count());
  return start_crossing(signature, total_bytes(outputs), call, compression, input.count, clusters * input.count,
                        [&](const HierarchicalChains& chains, const Crossing& crossing) {
                          return chains.all_gather(outputs, input, crossing);
                        });
}

WorkPtr HierarchicalCommunicator::broadcast(Buffer data, int root, CallOptions call) {
  // Along a tree it crosses once, too, and is not announced.
  const bool is_flat = data.bytes() < min_bytes_ || parts_->flat->broadcasts_along_tree(data.bytes());
  if (is_flat || call.compression || !is_rank(root)) return flat().broadcast(std::move(data), root, std::move(call));
  const Signature signature{.op = OpCode::broadcast, .dtype = data.dtype, .reduction = {}, .root = root};
  return start(
      signature, data.bytes(), call, [&](const HierarchicalChains& chains) { return chains.broadcast(data, root); },
      Form::hierarchical);
}

WorkPtr HierarchicalCommunicator::reduce(Buffer data, int root, ReduceOp op, CallOptions call) {
  check_reduction(data.dtype, op);
  if (data.bytes() < min_bytes_ || call.compression || !is_rank(root))
    return flat().reduce(std::move(data), root, op, std::move(call));
  const Signature signature{.op = OpCode::reduce, .dtype = data.dtype, .reduction = op, .root = root};
  return start(
      signature, data.bytes(), call, [&](const HierarchicalChains& chains) { return chains.reduce(data, root, op); },
      Form::hierarchical);
}

WorkPtr HierarchicalCommunicator::gather(std::vector<Buffer> outputs, Buffer input, int root, CallOptions call) {
  return flat().gather(std::move(outputs), std::move(input), root, std::move(call));
}

WorkPtr HierarchicalCommunicator::scatter(Buffer output, std::vector<Buffer> inputs, int root, CallOptions call) {
  return flat().scatter(std::move(output), std::move(inputs), root, std::move(call));
}

WorkPtr HierarchicalCommunicator::all_to_all(std::vector<Buffer> outputs, std::vector<Buffer> inputs,
                                             CallOptions call) {
  return flat().all_to_all(std::move(outputs), std::move(inputs), std::move(call));
}

WorkPtr HierarchicalCommunicator::barrier(CallOptions call) { return flat().barrier(std::move(call)); }

WorkPtr HierarchicalCommunicator::send(Buffer data, int peer, std::uint32_t tag, CallOptions call) {
  return flat().send(std::move(data), peer, tag, std::move(call));
}

WorkPtr HierarchicalCommunicator::recv(Buffer data, int peer, std::uint32_t tag, CallOptions call) {
  return flat().recv(std::move(data), peer, tag, std::move(call));
}

WorkPtr HierarchicalCommunicator::recv_any(Buffer data, std::uint32_t tag, CallOptions call) {
  return flat().recv_any(std::move(data), tag, std::move(call));
}

std::vector<WorkPtr> HierarchicalCommunicator::batch(std::vector<P2pCall> calls, CallOptions call) {
  return flat().batch(std::move(calls), std::move(call));
}

std::shared_ptr<Communicator> HierarchicalCommunicator::split(int color, int key) {
  auto options = split_options(*this, options_, splits_++, color, key);
  return options ? make_communicator(store_, std::move(*options)) : nullptr;
}

void HierarchicalCommunicator::abort(const std::string& reason) {
  scheduler_->fail(parts_->flat->abort_failure(reason));
}

std::vector<ConnectionInfo> HierarchicalCommunicator::connections() const {
  std::vector<ConnectionInfo> all = parts_->flat->connections();
  const auto append = [&all](const std::shared_ptr<PartCommunicator>& part, const std::vector<int>& ranks) {
    for (ConnectionInfo& info : part->connections()) {
      info.peer = ranks[static_cast<std::size_t>(info.peer)];
      all.push_back(std::move(info));
    }
  };
  append(parts_->scatter, parts_->hierarchy.members());
  append(parts_->gather, parts_->hierarchy.members());
  if (parts_->cross) append(parts_->cross, parts_->hierarchy.counterparts());
  return all;
}

std::vector<CommunicatorRecord> HierarchicalCommunicator::flight_record() const {
  std::vector<CommunicatorRecord> all;
  for (const auto& part : {parts_->flat, parts_->scatter, parts_->cross, parts_->gather})
    if (part) std::ranges::copy(part->flight_record(), std::back_inserter(all));
  return all;
}

}  // namespace holmes
