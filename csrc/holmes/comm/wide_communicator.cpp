#include "holmes/comm/wide_communicator.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/fields.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/record/communicator_record.hpp"

namespace holmes {
namespace {

// Of a row or a column: up to so many are connected each with every other one.
constexpr int most_meshed_ranks = 24;

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

int min_ranks(const CommunicatorOptions& options) {
  return options.wide_min_ranks.value_or(Env::read().wide_min_ranks);
}

// How much later the set-up of a part is due than that of the one before: only who waits for a missing rank itself can
// name it (rendezvous.cpp says how long that takes after the deadline).
constexpr Duration next_part_grace = std::chrono::seconds(3);

// For what others say, once there is an alarm: it has said why.
constexpr Duration alarmed_wait = std::chrono::milliseconds(500);

std::string alarm_key(const std::string& name) { return name + "/alarm"; }

// What fails in the set-up of one part is heard of in that of all others, and so is what ends a part that is connected
// already: `look` finds it, whenever a set-up looks for an alarm.
class PartStore final : public Store {
public:
  PartStore(std::shared_ptr<Store> base, std::string whole, std::function<std::optional<Failure>()> look)
      : base_(std::move(base)), whole_(std::move(whole)), look_(std::move(look)) {}
  void set(const std::string& key, const std::string& value) override { base_->set(place(key), value); }
  std::string get(const std::string& key, Duration timeout) override {
    if (!is_alarm(key)) return base_->get(place(key), is_alarmed_ ? std::min(timeout, alarmed_wait) : timeout);
    const auto ended = look_();
    std::string alarm = ended ? encode(*ended) : base_->get(place(key), timeout);
    is_alarmed_ = true;
    return alarm;
  }
  void wait(const std::string& key, Duration timeout) override { base_->wait(place(key), timeout); }
  std::size_t remove(std::span<const std::string> keys) override { return base_->remove(keys); }

private:
  static bool is_alarm(const std::string& key) { return key.ends_with("/alarm"); }
  std::string place(const std::string& key) const { return is_alarm(key) ? alarm_key(whole_) : key; }

  std::shared_ptr<Store> base_;
  std::string whole_;
  std::function<std::optional<Failure>()> look_;
  bool is_alarmed_ = false;
};

}  // namespace

class WideCommunicator::Body final : public Watched {
public:
  Body(const CommunicatorOptions& options, const std::shared_ptr<Store>& store)
      : name_(options.name),
        store_(store),
        recorder_(std::make_shared<FlightRecorder>(Env::read().flight_recorder_operations)),
        parts(std::make_shared<WideParts>(WideParts{.grid = Grid(options.size),
                                                    .rank = options.rank,
                                                    .name = name_,
                                                    .members = all_ranks(options.size),
                                                    .labels = labels_of(options, all_ranks(options.size))})) {
    // What they hear of ends all of them.
    const auto late_queue = std::make_shared<std::weak_ptr<StepQueue>>();
    pairs = std::make_shared<PairConnections>(store, options, [late_queue](const Failure& failure) {
      if (const auto known = late_queue->lock()) known->fail(failure);
    });
    queue = std::make_shared<StepQueue>([parts = parts, pairs = pairs](const Failure& failure) {
      parts->for_each_mesh([&](HostCommunicator& mesh) { mesh.fail(failure); });
      pairs->fail(failure);
    });
    *late_queue = queue;
  }

  void look() override {
    for_each_part([&](HostCommunicator& part) {
      for (const Failure& vanished : part.look_at_peers()) tell_lost(vanished);
      if (auto failure = part.failure()) queue->fail(std::move(*failure));
    });
  }

  // What has ended one of the parts that are there.
  std::optional<Failure> look_during_set_up() const {
    std::optional<Failure> ended;
    for_each_part([&](HostCommunicator& part) {
      const auto vanished = part.look_at_peers();
      if (!ended) ended = vanished.empty() ? part.failure() : vanished.front();
    });
    return ended;
  }

  // Its number that messages call so.
  int rank_of(int label) const {
    return static_cast<int>(std::ranges::find(parts->labels, label) - parts->labels.begin());
  }

  bool is_inherited() const { return epoch_ != fork_epoch(); }

  // The failure of a part is that of all.
  void take_over_failure() {
    for_each_part([&](HostCommunicator& part) {
      if (auto failure = part.failure()) queue->fail(std::move(*failure));
    });
  }

  template <typename Visit>
  void for_each_part(const Visit& visit) const {
    parts->for_each_mesh(visit);
    for (const auto& [peer, part] : pairs->connected()) visit(*part);
  }

  // Records an operation that `work` stands for, which has been entered.
  void record(RecordedCall call, const WorkPtr& work) {
    std::uint64_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      call.sequence = entered_++;
      number = recorder_->add(call, WorkState::queued, work->submitted());
      recorder_->start(number, work->submitted());
    }
    work->on_final([recorder = recorder_, progress = progress, number, own = std::weak_ptr(work)] {
      progress->end();
      const auto ended = own.lock();
      recorder->finish(number, ended && ended->state() == WorkState::completed, Clock::now());
    });
  }

  CommunicatorRecord own_record() const {
    CommunicatorRecord record;
    record.name = name_;
    record.backend = "host";
    record.rank = parts->rank;
    record.size = parts->grid.size();
    record.failure = queue->failure();
    record.state.emplace();
    record.state->taken = Clock::now();
    record.state->pending_count = queue->pending() + pairs->waiting();
    record.operations = recorder_->operations();
    const std::lock_guard lock(mutex_);
    record.entered = entered_;
    return record;
  }

private:
  // To ranks that wait for it and are not connected with it.
  void tell_lost(const Failure& vanished) {
    const int peer = vanished.context.peer ? rank_of(*vanished.context.peer) : parts->rank;
    {
      const std::lock_guard lock(mutex_);
      if (!told_lost_.insert(peer).second) return;
    }
    try {
      store_->set(lost_key(name_, peer), encode(vanished));
    } catch (const std::exception&) {  // the store is gone: nobody to tell
    }
  }

  const std::uint64_t epoch_ = fork_epoch();
  const std::string name_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<FlightRecorder> recorder_;
  mutable std::mutex mutex_;
  std::uint64_t entered_ = 0;
  std::set<int> told_lost_;

public:
  const std::shared_ptr<WideParts> parts;
  const std::shared_ptr<WholeProgress> progress = std::make_shared<WholeProgress>();
  std::shared_ptr<PairConnections> pairs;
  std::shared_ptr<StepQueue> queue;
};

namespace {

Failure aborted(const std::string& name, int rank, const std::string& reason) {
  return failure_or(ErrorKind::aborted, [&] {
    const std::string host = host_name();
    return Failure{
        ErrorKind::aborted,
        "communicator '" + name + "' was aborted by rank " + std::to_string(rank) + " (host " + host + "): " + reason,
        {.rank = rank}};
  });
}

// Of an operation in steps.
class WideWork final : public Work {
public:
  WideWork(std::weak_ptr<StepQueue> queue, std::shared_ptr<const WideParts> parts, OpCode op)
      : queue_(std::move(queue)), parts_(std::move(parts)), op_(op) {}

private:
  void abandon(const std::string& reason) override {
    const auto queue = queue_.lock();
    if (!queue) return;
    const std::string what = std::string(holmes::name(op_)) + " was given up: " + reason;
    queue->fail(aborted(parts_->name, parts_->label(parts_->rank), what));
  }

  std::weak_ptr<StepQueue> queue_;
  std::shared_ptr<const WideParts> parts_;
  OpCode op_;
};

// Where it fails, all fails.
void follow(const WorkPtr& work, const std::weak_ptr<StepQueue>& queue) {
  work->on_final([own = std::weak_ptr(work), queue] {
    const auto ended = own.lock();
    const auto known = queue.lock();
    if (!ended || !known || ended->state() != WorkState::failed) return;
    known->fail(failure_of(ended->error()));
  });
}

}  // namespace

bool WideCommunicator::is_for(const CommunicatorOptions& options) {
  return options.size >= std::max(min_ranks(options), Grid::least_ranks) &&
         !options.local_completion.value_or(Env::read().local_completion);
}

WideCommunicator::WideCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options)
    : store_(std::move(store)), options_(std::move(options)), body_(std::make_shared<Body>(options_, store_)) {
  tell_ranks_with_a_mesh();
  try {
    connect_parts();
  } catch (const HolmesError& error) {
    give_up(failure_of(error));
    throw;
  } catch (const std::exception& error) {
    give_up({ErrorKind::job, std::string("the set-up was given up: ") + error.what(), {}});
    throw;
  }
  const Grid& grid = body_->parts->grid;
  log(LogLevel::info, options_.job_rank.value_or(options_.rank),
      "communicator '" + options_.name + "' is wide: " + std::to_string(grid.rows()) + " rows, " +
          std::to_string(grid.columns()) + " columns; this rank is number " +
          std::to_string(body_->parts->own_index()) + " of row " + std::to_string(body_->parts->own_row()));
}

// Those who are connected with this rank hear of it there, the others of the set-up from the store.
void WideCommunicator::give_up(const Failure& failure) {
  body_->queue->fail(failure);
  try {
    store_->set(alarm_key(options_.name), encode(failure));
  } catch (const std::exception&) {  // the store is gone: nobody to tell
  }
}

// Ranks that were told otherwise, or by another version, make a mesh. They hear of it there, and then so do all.
void WideCommunicator::tell_ranks_with_a_mesh() {
  const std::string told = encode(
      Failure{ErrorKind::usage,
              "rank " + std::to_string(label_of(options_, options_.rank)) + " (host " + host_name() +
                  ") of communicator '" + options_.name + "' makes a wide group of its " +
                  std::to_string(options_.size) + " ranks (wide_min_ranks=" + std::to_string(min_ranks(options_)) +
                  "), another one does not; give every rank the same wide_min_ranks (HOLMES_WIDE_MIN_RANKS) and the "
                  "same local_completion (HOLMES_LOCAL_COMPLETION)",
              {.rank = label_of(options_, options_.rank)}});
  store_->set(options_.name + "/rank/" + std::to_string(options_.rank), told);
  if (options_.rank != 0) return;
  FieldWriter records;
  records.add(told);
  store_->set(options_.name + "/records", records.take());
}

void WideCommunicator::connect_parts() {
  connect(*body_->parts, options_.name,
          std::make_shared<PartStore>(store_, options_.name, [this] { return body_->look_during_set_up(); }));
  watch(body_);
  CallOptions call;
  call.timeout = options_.connect_timeout;
  barrier(call)->wait();
}

void WideCommunicator::connect(WideParts& parts, const std::string& name, const std::shared_ptr<Store>& store) {
  const auto in_whole = [&parts](std::vector<int> members) {
    for (int& member : members) member = parts.members[static_cast<std::size_t>(member)];
    return members;
  };
  const int row = parts.own_row();
  connect(parts.row, name + "/row" + std::to_string(row), in_whole(parts.grid.row_members(row)), parts.own_index(),
          store);
  for (const int number : parts.grid.columns_of(parts.rank)) {
    parts.columns.push_back({.number = number});
    connect(parts.columns.back().part, name + "/column" + std::to_string(number),
            in_whole(parts.grid.column_members(number)), row, store);
  }
}

void WideCommunicator::connect(WidePart& part, const std::string& name, const std::vector<int>& members, int rank,
                               const std::shared_ptr<Store>& store) {
  const int size = static_cast<int>(members.size());
  if (size >= Grid::least_ranks && size >= std::min(most_meshed_ranks + 1, min_ranks(options_))) {
    part.wide = std::make_shared<WideParts>(WideParts{.grid = Grid(size),
                                                      .rank = rank,
                                                      .name = options_.name,
                                                      .members = members,
                                                      .labels = labels_of(options_, members),
                                                      .scratch = body_->parts->scratch});
    connect(*part.wide, name, store);
    return;
  }
  CommunicatorOptions options = part_options(options_, name, members, rank);
  options.connect_timeout += next_part_grace * body_->parts->mesh_count();
  part.mesh = std::make_shared<HostCommunicator>(store, std::move(options), body_->progress);
}

WideCommunicator::~WideCommunicator() {
  if (body_->is_inherited()) {  // its threads, and who held its locks, stayed in the parent
    new std::shared_ptr<Body>(std::move(body_));
    return;
  }
  where_memory_allows([&] { body_->take_over_failure(); });  // which is the reason why all of them end
  if (body_->queue->pending() > 0 || body_->pairs->waiting() > 0)
    body_->queue->fail(
        aborted(options_.name, label_of(options_, options_.rank), "it was destroyed with operations pending"));
  body_->pairs->close();
}

void WideCommunicator::abort(const std::string& reason) {
  if (!body_->is_inherited()) fail(abort_failure(reason));
}

WorkPtr WideCommunicator::announce(const Signature& signature, CallOptions call) {
  return start({.op = signature.op,
                .dtype = signature.dtype,
                .reduction = signature.reduction,
                .root = signature.root,
                .form = signature.form,
                .bytes = signature.announced_bytes,
                .counts_digest = signature.counts_digest},
               signature.count, call, [](const WideSteps& steps) { return steps.barrier(); });
}

void WideCommunicator::fail(const Failure& failure) { body_->queue->fail(failure); }

std::optional<Failure> WideCommunicator::failure() const {
  body_->take_over_failure();
  return body_->queue->failure();
}

Failure WideCommunicator::abort_failure(const std::string& reason) const {
  return aborted(options_.name, label_of(options_, options_.rank), reason);
}

void WideCommunicator::watch_peers(const std::function<void(const Failure&)>& told) {
  body_->parts->for_each_mesh([&](HostCommunicator& mesh) {
    mesh.watch_peers([told, queue = std::weak_ptr(body_->queue)](const Failure& failure) {
      const auto known = queue.lock();
      if (known && !is_farewell(failure)) known->fail(failure);  // so the other parts' peers hear of it
      told(failure);
    });
  });
}

bool WideCommunicator::is_dead() const {
  if (body_->is_inherited()) return true;
  bool is_dead = body_->queue->failure().has_value();
  body_->for_each_part([&](const HostCommunicator& part) { is_dead |= part.is_dead(); });
  return is_dead;
}

void WideCommunicator::check_usable(const CallOptions& call) const {
  body_->parts->for_each_mesh([](const HostCommunicator& mesh) { mesh.check_usable(); });
  arguments_.check_not_compressed(call);
  body_->take_over_failure();
  if (options_.labels.empty()) return body_->queue->throw_if_failed(options_.name);
  if (const auto failure = body_->queue->failure()) failure->raise();  // users know the one that it is a part of
}

template <typename Make>
WorkPtr WideCommunicator::start(WholeCall whole, std::size_t count, const CallOptions& call, const Make& make) {
  check_usable(call);
  const auto work = std::make_shared<WideWork>(body_->queue, body_->parts, whole.op);
  const auto deadline = work->submitted() + call.timeout.value_or(options_.timeout);
  whole.number = body_->progress->enter();
  StepList list;
  try {
    list = make(WideSteps(body_->parts, std::make_shared<const WholeCall>(whole), deadline,
                          call.average_over.value_or(options_.size)));
    body_->record(
        {.op = whole.op, .dtype = whole.dtype, .reduction = whole.reduction, .root = whole.root, .count = count}, work);
  } catch (const std::exception&) {
    body_->progress->withdraw();
    throw;
  }
  try {
    body_->queue->start(std::move(list), work, !call.async);
  } catch (const std::exception&) {
    work->fail(std::current_exception());  // for the record
    throw;
  }
  return work;
}

WorkPtr WideCommunicator::all_reduce(Buffer data, ReduceOp op, CallOptions call) {
  check_reduction(data.dtype, op);
  if (!options_.clusters.empty()) call.compression.reset();  // nothing crosses by itself
  return start({.op = OpCode::all_reduce,
                .dtype = data.dtype,
                .reduction = op,
                .bytes = data.bytes(),
                .counts_digest = digest_in_list(0, call.in_list)},
               data.count, call, [&](const WideSteps& steps) { return steps.all_reduce(data, op); });
}

WorkPtr WideCommunicator::reduce_scatter(Buffer output, std::vector<Buffer> inputs, ReduceOp op, CallOptions call) {
  const auto own = static_cast<std::size_t>(options_.rank);
  check_reduction(output.dtype, op);
  arguments_.check_one_per_rank("reduce_scatter: inputs", inputs, output.dtype);
  Arguments::check_equal_count("reduce_scatter", output, inputs[own]);
  check_apart("reduce_scatter", {&output, 1}, 0, inputs, own);
  return start({.op = OpCode::reduce_scatter,
                .dtype = output.dtype,
                .reduction = op,
                .bytes = total_bytes(inputs),
                .counts_digest = digest_in_list(digest_of_counts(inputs), call.in_list)},
               output.count, call, [&](const WideSteps& steps) { return steps.reduce_scatter(output, inputs, op); });
}

WorkPtr WideCommunicator::all_gather(std::vector<Buffer> outputs, Buffer input, CallOptions call) {
  const auto own = static_cast<std::size_t>(options_.rank);
  arguments_.check_one_per_rank("all_gather: outputs", outputs, input.dtype);
  Arguments::check_equal_count("all_gather", outputs[own], input);
  check_apart("all_gather", outputs, own, {&input, 1}, 0);
  return start({.op = call.told_as,
                .dtype = input.dtype,
                .bytes = total_bytes(outputs),
                .counts_digest = digest_in_list(digest_of_counts(outputs), call.in_list)},
               input.count, call, [&](const WideSteps& steps) { return steps.all_gather(outputs, input); });
}

WorkPtr WideCommunicator::broadcast(Buffer data, int root, CallOptions call) {
  arguments_.check_rank("broadcast: root", root);
  return start({.op = OpCode::broadcast, .dtype = data.dtype, .root = root, .bytes = data.bytes()}, data.count, call,
               [&](const WideSteps& steps) { return steps.broadcast(data, root); });
}

WorkPtr WideCommunicator::reduce(Buffer data, int root, ReduceOp op, CallOptions call) {
  check_reduction(data.dtype, op);
  arguments_.check_rank("reduce: root", root);
  return start({.op = OpCode::reduce, .dtype = data.dtype, .reduction = op, .root = root, .bytes = data.bytes()},
               data.count, call, [&](const WideSteps& steps) { return steps.reduce(data, root, op); });
}

WorkPtr WideCommunicator::gather(std::vector<Buffer> outputs, Buffer input, int root, CallOptions call) {
  const auto own = static_cast<std::size_t>(options_.rank);
  const DType dtype = input.dtype;
  const std::size_t count = input.count;
  arguments_.check_rank("gather: root", root);
  if (root == options_.rank) {
    arguments_.check_one_per_rank("gather: outputs", outputs, dtype);
    Arguments::check_equal_count("gather", outputs[own], input);
    check_apart("gather", outputs, own, {&input, 1}, 0);
  } else {
    outputs = no_data(dtype, options_.size);
  }
  std::vector<Buffer> inputs = no_data(dtype, options_.size);
  inputs[static_cast<std::size_t>(root)] = std::move(input);
  return start({.op = OpCode::gather, .dtype = dtype, .root = root}, count, call,
               [&](const WideSteps& steps) { return steps.exchange(outputs, inputs); });
}

WorkPtr WideCommunicator::scatter(Buffer output, std::vector<Buffer> inputs, int root, CallOptions call) {
  const auto own = static_cast<std::size_t>(options_.rank);
  const DType dtype = output.dtype;
  const std::size_t count = output.count;
  arguments_.check_rank("scatter: root", root);
  if (root == options_.rank) {
    arguments_.check_one_per_rank("scatter: inputs", inputs, dtype);
    Arguments::check_equal_count("scatter", output, inputs[own]);
    check_apart("scatter", {&output, 1}, 0, inputs, own);
  } else {
    inputs = no_data(dtype, options_.size);
  }
  std::vector<Buffer> outputs = no_data(dtype, options_.size);
  outputs[static_cast<std::size_t>(root)] = std::move(output);
  return start({.op = OpCode::scatter, .dtype = dtype, .root = root}, count, call,
               [&](const WideSteps& steps) { return steps.exchange(outputs, inputs); });
}

WorkPtr WideCommunicator::all_to_all(std::vector<Buffer> outputs, std::vector<Buffer> inputs, CallOptions call) {
  const auto own = static_cast<std::size_t>(options_.rank);
  const DType dtype = inputs.empty() ? DType::uint8 : inputs.front().dtype;
  arguments_.check_one_per_rank("all_to_all: inputs", inputs, dtype);
  arguments_.check_one_per_rank("all_to_all: outputs", outputs, dtype);
  Arguments::check_equal_count("all_to_all", outputs[own], inputs[own]);
  check_apart("all_to_all", outputs, own, inputs, own);
  return start({.op = OpCode::all_to_all, .dtype = dtype}, total_bytes(inputs) / size_bytes(dtype), call,
               [&](const WideSteps& steps) { return steps.exchange(outputs, inputs); });
}

WorkPtr WideCommunicator::barrier(CallOptions call) {
  return start({.op = OpCode::barrier}, 0, call, [](const WideSteps& steps) { return steps.barrier(); });
}

WorkPtr WideCommunicator::send(Buffer data, int peer, std::uint32_t tag, CallOptions call) {
  return start_p2p({{true, std::move(data), peer, tag}}, call).front();
}

WorkPtr WideCommunicator::recv(Buffer data, int peer, std::uint32_t tag, CallOptions call) {
  return start_p2p({{false, std::move(data), peer, tag}}, call).front();
}

WorkPtr WideCommunicator::recv_any(Buffer, std::uint32_t, CallOptions) {
  throw UsageError("communicator '" + options_.name + "' of " + std::to_string(options_.size) +
                   " ranks is wide: its ranks are not all connected, so nothing is received from just anyone; name the "
                   "source, split off a smaller group, or give every rank a larger wide_min_ranks "
                   "(HOLMES_WIDE_MIN_RANKS)");
}

std::vector<WorkPtr> WideCommunicator::batch(std::vector<P2pCall> calls, CallOptions call) {
  return start_p2p(std::move(calls), call);
}

// Calls with one peer stay in order; between those of several there is none.
std::vector<WorkPtr> WideCommunicator::start_p2p(std::vector<P2pCall> calls, const CallOptions& call) {
  for (const P2pCall& one : calls) arguments_.check_peer(one.is_send, one.peer);
  check_usable(call);
  const WideParts& parts = *body_->parts;
  std::vector<WorkPtr> works;
  CallOptions options = call;
  options.async = call.async || calls.size() > 1;
  const auto start_on = [&](HostCommunicator& part, P2pCall& one, int place) {
    options.told_source = one.peer;
    return one.is_send ? part.send(std::move(one.buffer), place, one.tag, options)
                       : part.recv(std::move(one.buffer), place, one.tag, options);
  };
  for (P2pCall& one : calls) {
    const auto place = parts.place_of(one.peer);
    if (place.mesh)
      works.push_back(start_on(*place.mesh, one, place.rank));
    else
      works.push_back(body_->pairs->start(std::move(one), options));
    follow(works.back(), body_->queue);
  }
  if (call.async) return works;
  for (const WorkPtr& work : works) {
    try {
      work->wait();
    } catch (const HolmesError&) {  // the caller's wait raises it
    } catch (const Interrupted&) {
      await_all_final(works);
      throw;
    }
  }
  return works;
}

std::shared_ptr<Communicator> WideCommunicator::split(int color, int key) {
  auto options = split_options(*this, options_, splits_++, color, key);
  return options ? make_communicator(store_, std::move(*options)) : nullptr;
}

std::vector<ConnectionInfo> WideCommunicator::connections() const {
  std::vector<ConnectionInfo> all;
  body_->for_each_part([&](const HostCommunicator& part) {
    for (ConnectionInfo& info : part.connections()) {
      info.peer = body_->rank_of(part.label(info.peer));
      all.push_back(std::move(info));
    }
  });
  return all;
}

// The whole first, then its parts.
std::vector<CommunicatorRecord> WideCommunicator::flight_record() const {
  std::vector<CommunicatorRecord> all{body_->own_record()};
  body_->for_each_part(
      [&](const HostCommunicator& part) { std::ranges::copy(part.flight_record(), std::back_inserter(all)); });
  return all;
}

}  // namespace holmes
