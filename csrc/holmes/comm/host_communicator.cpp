#include "holmes/comm/host_communicator.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "holmes/collectives/digest.hpp"
#include "holmes/collectives/exchange.hpp"
#include "holmes/collectives/short_bruck.hpp"
#include "holmes/collectives/short_exchange.hpp"
#include "holmes/collectives/short_tree.hpp"
#include "holmes/comm/communicator.hpp"
#include "holmes/core/cpu_list.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/core/random.hpp"
#include "holmes/engine/io_thread.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/registry.hpp"
#include "holmes/record/watcher.hpp"
#include "holmes/transport/checked_channel.hpp"
#include "holmes/transport/rails_channel.hpp"
#include "holmes/transport/shm/shm_channel.hpp"
#include "holmes/transport/socket.hpp"
#include "holmes/transport/tcp_channel.hpp"

namespace holmes {

// A Work whose waiter moves the bytes itself where nobody else does.
class HostWork final : public Work {
public:
  HostWork(std::weak_ptr<Engine> engine, Clock::time_point submitted) : Work(submitted), engine_(std::move(engine)) {}
  void wait(std::optional<Duration> timeout) override {
    const auto start = timeout ? Clock::now() : Clock::time_point{};
    help(timeout ? std::optional(start + *timeout) : std::nullopt);
    await_final(timeout, start);
    Work::wait(std::nullopt);
  }
  // Until final; a failed work raises in the caller's wait. `now`: see Driver::help.
  void finish_here(std::optional<Clock::time_point> now = {}) {
    help(std::nullopt, now);
    await_final();
  }
  // As finish_here, of all of `works`: what is left is not left to another thread between one and the next.
  static void finish_all(std::span<const WorkPtr> works, std::optional<Clock::time_point> now) {
    for (const WorkPtr& work : works) work->mark_awaited();
    const auto engine = static_cast<HostWork&>(*works.front()).engine_.lock();
    bool pauses = false;
    for (; !works.empty(); works = works.subspan(1)) {
      auto& work = static_cast<HostWork&>(*works.front());
      while (!work.is_final()) {
        if (pauses) work.look_for_signals();
        pauses = engine && engine->driver().help(work, std::nullopt, std::exchange(now, {}), works.subspan(1));
        if (!pauses) work.await_final();
      }
    }
  }
  // As finish_here, of one that this thread has driven until it was to look for signals.
  void finish_paused() {
    if (is_final()) return;
    look_for_signals();
    finish_here();
  }

private:
  void help(std::optional<Clock::time_point> until, std::optional<Clock::time_point> now = {}) {
    if (is_final()) return;
    mark_awaited();
    const auto engine = engine_.lock();
    while (engine && engine->driver().help(*this, until, std::exchange(now, std::nullopt))) look_for_signals();
  }
  void abandon(const std::string& reason) override {
    if (const auto engine = engine_.lock()) engine->abort(reason);
  }

  std::weak_ptr<Engine> engine_;
};

namespace {

// A blocked thread wakes 25 to 35 us after its event (measured in a VM); what comes sooner is worth spinning for.
constexpr auto default_spin = std::chrono::microseconds(150);

// What an engine needs of the system.
struct EngineNeeds {
  IoThread* io_thread = nullptr;
  UniqueFd wake_fd;
};

EngineNeeds engine_needs(const Env& env, const CommunicatorOptions& options) {
  const UninheritedSockets makes_what_the_process_needs({});
  return {&io_thread_for(env, options.nics.empty() ? "" : options.nics.front().interface), event_fd()};
}

// The peers, connected already, are told that this rank cannot have what it needs of the system.
[[noreturn]] void tell_and_throw(const Group& group, const std::string& host, const std::string& what,
                                 std::optional<int> system_errno) {
  const int label = group.label(group.rank);
  const ErrorContext context{.rank = label, .peer = {}, .host = host, .nic = {}, .system_errno = system_errno};
  const std::string text = "rank " + std::to_string(label) + " (host " + host + "): " + what;
  for (const auto& control : group.controls)
    if (control) control->send_abort({ErrorKind::system, text, context});
  throw SystemError(text, context);
}

// The channels of a pair. `p2p` is returned beside the collective one.
struct ChannelPair {
  std::unique_ptr<Channel> collective;
  std::unique_ptr<Channel> p2p;
};

std::unique_ptr<Channel> make_tcp_channel(int peer, std::vector<Connection> sockets,
                                          const std::shared_ptr<RailsContext>& rails) {
  if (sockets.size() == 1) return std::make_unique<TcpChannel>(peer, std::move(sockets.front()));
  return std::make_unique<RailsChannel>(peer, std::move(sockets), rails);
}

// What the channels of a rank have in common.
struct SharedByChannels {
  CmaUse cma;
  ShmSegment::RingBytes ring_bytes;
  std::shared_ptr<RailsContext> rails;
  std::shared_ptr<MessageBytes> messages = std::make_shared<MessageBytes>();
};

ChannelPair make_plain_channels(PeerConnections& connections, int own_rank, ControlConnection& control,
                                const SharedByChannels& shared) {
  if (connections.rdma.collective) return {std::move(connections.rdma.collective), std::move(connections.rdma.p2p)};
  if (!connections.uses_shared_memory()) {
    return {make_tcp_channel(connections.peer, std::move(connections.collective), shared.rails),
            make_tcp_channel(connections.peer, std::move(connections.p2p), shared.rails)};
  }
  auto segment = std::make_shared<ShmSegment>(connections.shared_memory.get(), shared.ring_bytes);
  connections.shared_memory.reset();
  const int lower = own_rank < connections.peer ? 0 : 1;  // ring 0 and 2 go from the lower to the higher rank
  const auto make = [&](int first_ring, const char* purpose, std::shared_ptr<MessageBytes> messages) {
    ConnectionInfo info;
    info.peer = connections.peer;
    info.host = connections.host;
    info.transport = "shm";
    info.purpose = purpose;
    return std::make_unique<ShmChannel>(
        connections.peer, segment, first_ring + lower, first_ring + 1 - lower, [&control] { control.send_doorbell(); },
        shared.cma, std::move(info), std::move(messages));
  };
  return {make(0, "collective", nullptr), make(2, "p2p", shared.messages)};
}

ChannelPair make_channels(PeerConnections& connections, const CommunicatorOptions& options,
                          const std::string& own_place, ControlConnection& control, const SharedByChannels& shared) {
  const bool is_encrypted = !connections.collective.empty() && connections.collective.front().tls;
  ChannelPair pair = make_plain_channels(connections, options.rank, control, shared);
  if (options.integrity.value_or(false) && !is_encrypted)  // what is encrypted has a code of its own
    for (auto* channel : {&pair.collective, &pair.p2p})
      *channel = std::make_unique<CheckedChannel>(std::move(*channel), options.name, own_place, control.peer());
  return pair;
}

bool shares_processors(const Mesh& mesh) {
  return std::ranges::count_if(mesh.peers, &PeerConnections::uses_shared_memory) + 1 > online_processors();
}

// Unit of pipelining: what keeps two slices of every peer in the L2 cache.
std::size_t preferred_slice_bytes(const Mesh& mesh, int size, std::size_t collective_ring_bytes) {
  constexpr std::size_t staging_goal_bytes = 1024 * 1024;
  // Rails of different speed need a longer run to share.
  constexpr std::size_t rails_slice_factor = 4;
  const bool any_shared = std::any_of(mesh.peers.begin(), mesh.peers.end(), [](const PeerConnections& connections) {
    return connections.uses_shared_memory();
  });
  if (any_shared) return std::min<std::size_t>(collective_ring_bytes / 2, 64 * 1024);
  const std::size_t share = staging_goal_bytes / static_cast<std::size_t>(std::max(size - 1, 1));
  const std::size_t slice = std::clamp<std::size_t>(share / 4096 * 4096, 64 * 1024, 256 * 1024);
  const bool any_rails = std::any_of(mesh.peers.begin(), mesh.peers.end(), [](const PeerConnections& connections) {
    return connections.collective.size() > 1 && !connections.collective.back().is_reserve;
  });
  return any_rails ? slice * rails_slice_factor : slice;
}

bool has_far_peer(const Mesh& mesh) {
  return std::ranges::any_of(mesh.peers, [](const PeerConnections& connections) {
    if (connections.peer < 0 || connections.uses_shared_memory()) return false;
    const auto round_trip = shortest_round_trip(connections.control.front().fd.get());
    return round_trip && *round_trip >= far_round_trip;
  });
}

bool moves_directly(const Group& group) {
  return std::ranges::all_of(group.channels,
                             [](const auto& channel) { return !channel || channel->lasting_bytes() < SIZE_MAX; });
}

// Ranks of the own cluster share its uplinks with this one; so do their messages of other groups.
void share_uplinks(Group& group, const Mesh& mesh, const CommunicatorOptions& options) {
  // Each of them tells all others twenty times a second what it carries; or, over one without a priority, takes turns.
  constexpr std::size_t most_neighbours = 32;
  const bool is_paced = options.priority.value_or(highest_priority) < highest_priority;
  bool spans_clusters = false;
  for (const PeerConnections& connections : mesh.peers) {
    if (connections.peer < 0) continue;
    if (connections.control.front().info.is_between)
      spans_clusters = true;
    else
      group.neighbours.push_back(connections.peer);
  }
  if (!spans_clusters || (!is_paced && group.neighbours.size() > most_neighbours)) group.neighbours.clear();
  for (std::size_t rail = 0; !group.neighbours.empty() && rail < options.nics.size(); ++rail)
    group.uplinks.push_back(Uplink::of(options.nics[rail].interface));
}

std::size_t largest_bytes(const std::vector<Buffer>& buffers) {
  std::size_t most = 0;
  for (const Buffer& buffer : buffers) most = std::max(most, buffer.bytes());
  return most;
}

// The first rank of the cluster of `rank`; `clusters` as in CommunicatorOptions.
int cluster_leader(const std::vector<int>& clusters, std::size_t rank) {
  return clusters.empty() ? 0 : static_cast<int>(std::ranges::find(clusters, clusters[rank]) - clusters.begin());
}

constexpr std::int64_t no_job_rank = -1;  // on the wire only

// How long a wait polls: the option, else the variable, else the default.
Duration spin_of(const Env& env, const CommunicatorOptions& options) {
  if (!options.spin_us) return env.spin.value_or(default_spin);
  if (*options.spin_us >= 0) return std::chrono::microseconds(*options.spin_us);
  throw UsageError("spin_us=" + std::to_string(*options.spin_us) +
                   " is not possible; it must be a number of microseconds, 0 or more");
}

// The process's number in the job, where it has one.
std::optional<std::int64_t> job_rank_of(const CommunicatorOptions& options) {
  if (options.job_rank) return options.job_rank;
  const char* text = std::getenv("RANK");
  char* end = nullptr;
  const long rank = text ? std::strtol(text, &end, 10) : -1;
  if (rank < 0 || !end || *end != '\0') return std::nullopt;
  return rank;
}

}  // namespace

HostCommunicator::HostCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options,
                                   std::shared_ptr<WholeProgress> whole)
    : store_(std::move(store)), options_(std::move(options)) {
  const ShmSegment::RingBytes ring_bytes = ShmSegment::ring_bytes_for(options_.size);
  Mesh mesh = connect_mesh(*store_, options_, ShmSegment::segment_bytes(ring_bytes));
  has_left_rdma_ = mesh.no_rdma.has_value();
  if (has_left_rdma_) options_.rdma_ports.clear();  // what is split from it need not try again
  const Env env = Env::read();
  std::vector<int> sockets = mesh.sockets();
  const auto rails = make_rails_context(options_, env.rail_timeout);

  auto group = std::make_unique<Group>();
  group->rank = options_.rank;
  group->size = options_.size;
  group->name = options_.name;
  group->labels = options_.labels;
  group->whole = std::move(whole);
  group->recorder = std::make_unique<FlightRecorder>(env.flight_recorder_operations);
  group->pinned_ring_bytes = env.pinned_ring_bytes;
  group->channels.resize(mesh.peers.size());
  group->controls.resize(mesh.peers.size());
  const std::string host = static_cast<std::size_t>(options_.rank) < mesh.hosts.size() ? mesh.hosts[options_.rank] : "";
  const std::string place = "rank " + std::to_string(group->label(options_.rank)) + " (host " + host + ")";
  std::vector<std::unique_ptr<Channel>> p2p(mesh.peers.size());
  const std::size_t slice_bytes = preferred_slice_bytes(mesh, options_.size, ring_bytes.collective);
  group->is_far = has_far_peer(mesh);
  share_uplinks(*group, mesh, options_);
  for (PeerConnections& connections : mesh.peers) {
    if (connections.peer < 0) continue;
    group->controls[connections.peer] = std::make_unique<ControlConnection>(
        group->label(connections.peer), connections.host, connections.nic, std::move(connections.control));
    group->any_shared_memory |= connections.uses_shared_memory();
  }
  EngineNeeds needs;
  const SharedByChannels shared{env.cma, ring_bytes, rails};
  // Measured, 4 and 8 ranks on 2 processors, rings of 1 MiB: 1 and 2 MiB take less through them, 8 MiB by CMA. Both
  // ways (4 ranks, 1.5 MiB): 512 KiB, and 1 MiB by CMA.
  constexpr std::size_t rings_per_call = 4, most_per_call = 4 << 20;
  if (shares_processors(mesh))
    shared.messages->ring_calls = {std::min(rings_per_call * ring_bytes.p2p, most_per_call), ring_bytes.p2p / 2};
  try {
    for (PeerConnections& connections : mesh.peers) {
      if (connections.peer < 0) continue;
      ChannelPair channels = make_channels(connections, options_, place, *group->controls[connections.peer], shared);
      group->channels[connections.peer] = std::move(channels.collective);
      p2p[connections.peer] = std::move(channels.p2p);
    }
    needs = engine_needs(env, options_);
  } catch (const SystemError& error) {
    tell_and_throw(*group, host, error.what(), error.context().system_errno);
  } catch (const std::bad_alloc&) {
    tell_and_throw(*group, host, "no memory is left for communicator '" + options_.name + "'", ENOMEM);
  }
  engine_ = std::make_shared<Engine>(std::move(group), std::move(p2p), place, spin_of(env, options_), *needs.io_thread,
                                     std::move(needs.wake_fd), std::move(sockets));
  for (std::size_t rail = 0; rail < engine_->group().uplinks.size(); ++rail)
    engine_->group().uplinks[rail]->join(engine_, options_.priority, static_cast<int>(rail));
  if (engine_->group().whole) engine_->group().whole->join(engine_);
  if (!is_internal(options_.name)) register_source(std::shared_ptr<RecordSource>(engine_, &engine_->records()));
  start_watcher(env);
  own_place_ = describe_peer(engine_->group().label(options_.rank), host,
                             options_.nics.empty() ? "" : options_.nics.front().interface);
  introduce(mesh, slice_bytes);
  digest_every_ = options_.size > 1 ? static_cast<std::uint64_t>(options_.integrity_digest_every.value_or(0)) : 0;
}

HostCommunicator::~HostCommunicator() { engine_->close(); }

// What every operation starts with. `compared`: where its result is compared over the ranks afterwards, what the caller
// waits for; then nobody waits for `work`.
struct HostCommunicator::Call {
  std::shared_ptr<HostWork> work;
  Clock::time_point deadline;
  bool async;
  std::shared_ptr<HostWork> compared{};
};

HostCommunicator::Call HostCommunicator::begin(const CallOptions& options, Clock::time_point submitted) const {
  engine_->throw_if_inherited();
  arguments_.check_not_compressed(options);
  if (options.held) options.held->let_go();
  auto work = std::make_shared<HostWork>(engine_, submitted);
  const auto deadline = submitted + options.timeout.value_or(options_.timeout);
  return {std::move(work), deadline, options.async};
}

HostCommunicator::Call HostCommunicator::begin_alike(const CallOptions& options) {
  Call call = begin(options);
  if (digest_every_ > 0 && ++alike_count_ % digest_every_ == 0)
    call.compared = std::make_shared<HostWork>(engine_, call.work->submitted());
  return call;
}

WorkPtr HostCommunicator::finish_alike(Call call, const Signature& signature, std::unique_ptr<Collective> collective,
                                       std::vector<Buffer> result) {
  if (!call.compared) return finish(std::move(call), std::move(collective));
  call.work = std::move(call.compared);
  auto digest = std::make_unique<ResultDigest>(engine_->group(), signature, call.work, call.deadline, std::move(result),
                                               own_place_);
  engine_->submit(std::move(collective));  // once nothing that takes memory is left to make
  return finish(std::move(call), std::move(digest));
}

template <typename Fill, typename Make>
WorkPtr HostCommunicator::run_short(const Signature& signature, std::size_t pair_bytes, const CallOptions& options,
                                    const Fill& fill, const Make& make) {
  return run_short(short_form(engine_->group(), signature.op, pair_bytes), signature, options, fill, make);
}

template <typename Fill, typename Make>
WorkPtr HostCommunicator::run_short(ShortForm form, const Signature& signature, const CallOptions& options,
                                    const Fill& fill, const Make& make) {
  Group& group = engine_->group();
  if (!group.takes_short || options.async || digest_every_ > 0 || form == ShortForm::none) return nullptr;
  if (form == ShortForm::log_steps) return run_short(ShortBruck(group, signature), options, fill, make);
  if (form == ShortForm::tree) return run_short(ShortTree(group, signature), options, fill, make);
  return run_short(ShortExchange(group, signature), options, fill, make);
}

template <typename Fill, typename Make>
WorkPtr HostCommunicator::run_short(ShortCall&& called, const CallOptions& options, const Fill& fill,
                                    const Make& make) {
  engine_->throw_if_inherited();
  arguments_.check_not_compressed(options);
  fill(called);
  ShortRun run(engine_->driver(), called, options.timeout.value_or(options_.timeout), options.held);
  if (run.state() == ShortRun::State::not_begun) return nullptr;
  if (run.state() == ShortRun::State::done) return run.completed();
  const Call call = begin(options, run.submitted());
  call.work->mark_awaited();
  run.go_on(make(call));
  call.work->finish_paused();
  return call.work;
}

template <typename Fill, typename Make>
WorkPtr HostCommunicator::run(const Signature& signature, std::size_t pair_bytes, const CallOptions& options,
                              const Fill& fill, const Make& make) {
  if (WorkPtr work = run_short(signature, pair_bytes, options, fill, make)) return work;
  Call call = begin(options);
  auto collective = make(call);
  return finish(std::move(call), std::move(collective));
}

WorkPtr HostCommunicator::finish(Call call, std::unique_ptr<Collective> collective) {
  if (!call.async) call.work->mark_awaited();
  if (!call.async && engine_->driver().run_here(collective)) {
    call.work->finish_paused();
    return call.work;
  }
  const std::size_t bytes = collective->send_bytes();
  engine_->submit(std::move(collective));
  if (call.async) {
    engine_->driver().run_in_background(bytes);
  } else {
    call.work->finish_here();
  }
  return call.work;
}

WorkPtr HostCommunicator::all_reduce(Buffer data, ReduceOp op, CallOptions options) {
  check_reduction(data.dtype, op);
  // Over clusters it is allowed, but here nothing crosses by itself.
  if (!options_.clusters.empty()) options.compression.reset();
  const Signature signature{.op = OpCode::all_reduce,
                            .dtype = data.dtype,
                            .reduction = op,
                            .root = {},
                            .counts_digest = digest_in_list(0, options.in_list),
                            .average_over = options.average_over,
                            .count = data.count,
                            .whole = options.part_of};
  const auto make = [&](const Call& call) {
    return choose_all_reduce(engine_->group(), signature, call.work, call.deadline, data);
  };
  const auto fill = [&](ShortCall& called) {
    for (int peer = 0; peer < options_.size; ++peer) called.set(peer, data.data, data.bytes(), data.data, data.bytes());
    called.set_reduction(data.count);
  };
  if (WorkPtr work = run_short(signature, data.bytes(), options, fill, make)) return work;
  Call call = begin_alike(options);
  auto collective = make(call);
  return finish_alike(std::move(call), signature, std::move(collective), {std::move(data)});
}

WorkPtr HostCommunicator::reduce_scatter(Buffer output, std::vector<Buffer> inputs, ReduceOp op, CallOptions options) {
  check_reduction(output.dtype, op);
  arguments_.check_one_per_rank("reduce_scatter: inputs", inputs, output.dtype);
  Arguments::check_equal_count("reduce_scatter", output, inputs[options_.rank]);
  check_apart("reduce_scatter", {&output, 1}, 0, inputs, own());
  const Signature signature{
      .op = OpCode::reduce_scatter,
      .dtype = output.dtype,
      .reduction = op,
      .root = {},
      .counts_digest = digest_in_list(digest_where_relayed(engine_->group(), inputs), options.in_list),
      .average_over = options.average_over,
      .count = output.count,
      .whole = options.part_of};
  const auto make = [&](const Call& call) {
    return choose_reduce_scatter(engine_->group(), signature, call.work, call.deadline, std::move(output),
                                 std::move(inputs));
  };
  const auto fill = [&](ShortCall& called) {
    for (int peer = 0; peer < options_.size; ++peer)
      called.set(peer, inputs[peer].data, inputs[peer].bytes(), output.data, output.bytes());
    called.set_reduction(output.count);
  };
  return run(signature, largest_bytes(inputs), options, fill, make);
}

WorkPtr HostCommunicator::reduce(Buffer data, int root, ReduceOp op, CallOptions options) {
  check_reduction(data.dtype, op);
  arguments_.check_rank("reduce: root", root);
  const Signature signature{.op = OpCode::reduce,
                            .dtype = data.dtype,
                            .reduction = op,
                            .root = root,
                            .average_over = options.average_over,
                            .count = data.count,
                            .whole = options.part_of};
  const auto make = [&](const Call& call) {
    return choose_reduce(engine_->group(), signature, call.work, call.deadline, std::move(data));
  };
  const auto fill = [&](ShortCall& called) {
    const bool is_root = root == options_.rank;
    for (int peer = 0; peer < options_.size; ++peer)
      called.set(peer, data.data, peer == root ? data.bytes() : 0, data.data, is_root ? data.bytes() : 0);
    if (is_root) called.set_reduction(data.count);
  };
  return run(signature, data.bytes(), options, fill, make);
}

WorkPtr HostCommunicator::exchange(const Signature& signature, std::vector<Buffer> sends, std::vector<Buffer> recvs,
                                   const CallOptions& options) {
  const auto make = [&](const Call& call) {
    return choose_exchange(engine_->group(), signature, call.work, call.deadline, std::move(sends), std::move(recvs));
  };
  const auto fill = [&](ShortCall& called) {
    for (int peer = 0; peer < options_.size; ++peer)
      called.set(peer, sends[peer].data, sends[peer].bytes(), recvs[peer].data, recvs[peer].bytes());
  };
  const std::size_t most_bytes = std::max(largest_bytes(sends), largest_bytes(recvs));
  return run(signature, most_bytes, options, fill, make);
}

WorkPtr HostCommunicator::all_gather(std::vector<Buffer> outputs, Buffer input, CallOptions options) {
  arguments_.check_one_per_rank("all_gather: outputs", outputs, input.dtype);
  Arguments::check_equal_count("all_gather", outputs[options_.rank], input);
  check_apart("all_gather", outputs, own(), {&input, 1}, 0);
  const Signature signature{
      .op = options.told_as,
      .dtype = input.dtype,
      .reduction = {},
      .root = {},
      .counts_digest = digest_in_list(digest_where_relayed(engine_->group(), outputs), options.in_list),
      .count = input.count,
      .whole = options.part_of};
  const auto make = [&](const Call& call) {
    return choose_all_gather(engine_->group(), signature, call.work, call.deadline, outputs, std::move(input));
  };
  const auto fill = [&](ShortCall& called) {
    for (int peer = 0; peer < options_.size; ++peer)
      called.set(peer, input.data, input.bytes(), outputs[peer].data, outputs[peer].bytes());
  };
  const std::size_t most_bytes = std::max(input.bytes(), largest_bytes(outputs));
  if (WorkPtr work = run_short(signature, most_bytes, options, fill, make)) return work;
  Call call = begin_alike(options);
  auto collective = make(call);
  return finish_alike(std::move(call), signature, std::move(collective), std::move(outputs));
}

WorkPtr HostCommunicator::broadcast(Buffer data, int root, CallOptions options) {
  arguments_.check_rank("broadcast: root", root);
  const Signature signature{.op = OpCode::broadcast,
                            .dtype = data.dtype,
                            .reduction = {},
                            .root = root,
                            .count = data.count,
                            .whole = options.part_of};
  const auto make = [&](const Call& call) {
    return choose_broadcast(engine_->group(), signature, call.work, call.deadline, data);
  };
  const auto fill = [&](ShortCall& called) {
    const bool is_root = root == options_.rank;
    for (int peer = 0; peer < options_.size; ++peer)
      called.set(peer, data.data, is_root ? data.bytes() : 0, data.data, peer == root ? data.bytes() : 0);
  };
  if (WorkPtr work = run_short(signature, data.bytes(), options, fill, make)) return work;
  Call call = begin_alike(options);
  auto collective = make(call);
  return finish_alike(std::move(call), signature, std::move(collective), {std::move(data)});
}

WorkPtr HostCommunicator::gather(std::vector<Buffer> outputs, Buffer input, int root, CallOptions options) {
  arguments_.check_rank("gather: root", root);
  const DType dtype = input.dtype;
  const std::size_t count = input.count;
  std::vector<Buffer> sends = no_data(dtype, options_.size);
  if (root == options_.rank) {
    arguments_.check_one_per_rank("gather: outputs", outputs, dtype);
    Arguments::check_equal_count("gather", outputs[root], input);
    check_apart("gather", outputs, own(), {&input, 1}, 0);
  } else {
    outputs = no_data(dtype, options_.size);
  }
  sends[root] = std::move(input);
  return exchange(
      {.op = OpCode::gather, .dtype = dtype, .reduction = {}, .root = root, .count = count, .whole = options.part_of},
      std::move(sends), std::move(outputs), options);
}

WorkPtr HostCommunicator::scatter(Buffer output, std::vector<Buffer> inputs, int root, CallOptions options) {
  arguments_.check_rank("scatter: root", root);
  const DType dtype = output.dtype;
  const std::size_t count = output.count;
  std::vector<Buffer> recvs = no_data(dtype, options_.size);
  if (root == options_.rank) {
    arguments_.check_one_per_rank("scatter: inputs", inputs, dtype);
    Arguments::check_equal_count("scatter", output, inputs[root]);
    check_apart("scatter", {&output, 1}, 0, inputs, own());
  } else {
    inputs = no_data(dtype, options_.size);
  }
  recvs[root] = std::move(output);
  return exchange(
      {.op = OpCode::scatter, .dtype = dtype, .reduction = {}, .root = root, .count = count, .whole = options.part_of},
      std::move(inputs), std::move(recvs), options);
}

WorkPtr HostCommunicator::all_to_all(std::vector<Buffer> outputs, std::vector<Buffer> inputs, CallOptions options) {
  const DType dtype = inputs.empty() ? DType::uint8 : inputs.front().dtype;
  const std::size_t count = total_bytes(inputs) / size_bytes(dtype);
  arguments_.check_one_per_rank("all_to_all: inputs", inputs, dtype);
  arguments_.check_one_per_rank("all_to_all: outputs", outputs, dtype);
  Arguments::check_equal_count("all_to_all", outputs[options_.rank], inputs[options_.rank]);
  check_apart("all_to_all", outputs, own(), inputs, own());
  return exchange(
      {.op = OpCode::all_to_all, .dtype = dtype, .reduction = {}, .root = {}, .count = count, .whole = options.part_of},
      std::move(inputs), std::move(outputs), options);
}

WorkPtr HostCommunicator::barrier(CallOptions options) {
  return announce({.op = OpCode::barrier, .reduction = {}, .root = {}, .whole = options.part_of}, options);
}

// Sends first, so that nobody waits for one that waits itself.
std::size_t HostCommunicator::run_short(std::span<const P2pCall> calls, const CallOptions& options,
                                        std::span<WorkPtr> works) {
  constexpr std::size_t most_messages = 32;
  if (options.async || options.told_source || calls.size() > most_messages) return 0;
  std::array<ShortMessage, most_messages> messages;
  std::array<std::size_t, most_messages> places{};
  std::size_t count = 0;
  for (const bool sends : {true, false}) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const Buffer& buffer = calls[i].buffer;
      if (calls[i].is_send != sends) continue;
      if (buffer.device || buffer.bytes() > most_short_bytes) return 0;
      arguments_.check_peer(sends, calls[i].peer);
      if (!engine_->takes_short(calls[i].peer, sends ? count + 1 : 1)) return 0;
      places[count] = i;
      messages[count++] = {sends, buffer.data, buffer.bytes(), buffer.dtype, calls[i].peer, calls[i].tag, {}};
    }
  }
  engine_->throw_if_inherited();
  arguments_.check_not_compressed(options);
  const std::size_t carried =
      engine_->driver().run_short({messages.data(), count}, options.timeout.value_or(options_.timeout), options.held);
  for (std::size_t i = 0; i < carried; ++i) works[places[i]] = std::move(messages[i].completed);
  return carried;
}

P2pEngine::Request HostCommunicator::request(bool is_send, Buffer buffer, std::optional<int> peer, std::uint32_t tag,
                                             const CallOptions& options, Clock::time_point submitted) const {
  if (peer) {
    arguments_.check_peer(is_send, *peer);
  } else if (options_.size == 1) {
    throw UsageError("communicator '" + options_.name + "' has one rank: nobody can send to it");
  }
  Call call = begin(options, submitted);
  cuda::EventPtr ready;
  if (buffer.device) ready = cuda::Device::get(*buffer.device).mark(buffer.stream, is_send ? "send" : "recv");
  P2pEngine::Request made{is_send, std::move(buffer), peer, tag, std::move(call.work), call.deadline};
  made.begin = std::move(ready);
  made.told_source = options.told_source;
  return made;
}

std::vector<WorkPtr> HostCommunicator::finish_p2p(std::vector<P2pEngine::Request> requests,
                                                  const CallOptions& options) {
  std::vector<WorkPtr> works;
  std::size_t bytes = 0;
  for (const auto& request : requests) {
    works.push_back(request.work);
    bytes += request.buffer.bytes();
  }
  engine_->submit(std::move(requests));
  if (options.async) {
    engine_->driver().run_in_background(bytes);
  } else {
    try {
      HostWork::finish_all(works, works.front()->submitted());
    } catch (const Interrupted&) {
      await_all_final(works);
      throw;
    }
  }
  return works;
}

WorkPtr HostCommunicator::message(P2pCall call, const CallOptions& options) {
  WorkPtr work;
  if (run_short({&call, 1}, options, {&work, 1}) == 1) return work;
  return finish_p2p({request(call.is_send, std::move(call.buffer), call.peer, call.tag, options)}, options).front();
}

WorkPtr HostCommunicator::send(Buffer data, int peer, std::uint32_t tag, CallOptions options) {
  return message({true, std::move(data), peer, tag}, options);
}

WorkPtr HostCommunicator::recv(Buffer data, int peer, std::uint32_t tag, CallOptions options) {
  return message({false, std::move(data), peer, tag}, options);
}

WorkPtr HostCommunicator::recv_up_to(Buffer data, int peer, std::uint32_t tag,
                                     std::shared_ptr<std::size_t> received_bytes, CallOptions options) {
  if (data.device)
    throw UsageError("recv_up_to: a message into a GPU's memory has the size that both sides say; use recv");
  auto made = request(false, std::move(data), peer, tag, options);
  made.received_bytes = std::move(received_bytes);
  return finish_p2p({std::move(made)}, options).front();
}

WorkPtr HostCommunicator::recv_any(Buffer data, std::uint32_t tag, CallOptions options) {
  return finish_p2p({request(false, std::move(data), std::nullopt, tag, options)}, options).front();
}

std::vector<WorkPtr> HostCommunicator::batch(std::vector<P2pCall> calls, CallOptions options) {
  std::vector<WorkPtr> works(calls.size());
  if (!calls.empty() && run_short(calls, options, works) == calls.size()) return works;
  const auto submitted = Clock::now();
  std::vector<P2pEngine::Request> requests;
  for (std::size_t i = 0; i < calls.size(); ++i)
    if (!works[i])
      requests.push_back(
          request(calls[i].is_send, std::move(calls[i].buffer), calls[i].peer, calls[i].tag, options, submitted));
  if (requests.empty()) return works;
  const std::vector<WorkPtr> longer = finish_p2p(std::move(requests), options);
  auto next = longer.begin();
  for (WorkPtr& work : works)
    if (!work) work = *next++;
  return works;
}

std::shared_ptr<Communicator> HostCommunicator::split(int color, int key) {
  auto options = split_options(*this, options_, splits_++, color, key);
  return options ? make_communicator(store_, std::move(*options)) : nullptr;
}

bool HostCommunicator::is_far() const { return engine_->group().is_far; }

bool HostCommunicator::broadcasts_along_tree(std::size_t bytes) const {
  return goes_along_tree(engine_->group(), bytes);
}

WorkPtr HostCommunicator::announce(const Signature& signature, CallOptions options) {
  Group& group = engine_->group();
  const auto make = [&](const Call& call) {
    return choose_all_gather(group, signature, call.work, call.deadline, no_data(signature.dtype, options_.size),
                             Buffer{});
  };
  const auto fill = [&](ShortCall& called) {
    for (int peer = 0; peer < options_.size; ++peer) called.set(peer, nullptr, 0, nullptr, 0);
  };
  const ShortForm form = short_form(group, OpCode::barrier, 0);
  if (WorkPtr work = run_short(form, signature, options, fill, make)) return work;
  Call call = begin(options);
  auto collective = make(call);
  return finish(std::move(call), std::move(collective));
}

// By a receive from each of a message that nobody sends.
void HostCommunicator::watch_peers(const std::function<void(const Failure&)>& told) {
  constexpr auto endless = std::chrono::hours(24 * 365 * 100);
  const auto nothing = std::make_shared<std::vector<char>>(static_cast<std::size_t>(options_.size));
  std::vector<P2pCall> calls;
  for (int peer = 0; peer < options_.size; ++peer)
    if (peer != options_.rank)
      calls.push_back(
          {false, {&(*nothing)[static_cast<std::size_t>(peer)], 1, DType::uint8, nothing}, peer, internal_tag});
  if (calls.empty()) return;
  CallOptions call;
  call.async = true;
  call.timeout = endless;
  for (const WorkPtr& work : batch(std::move(calls), call))
    work->on_final([told, watched = work.get()] {
      if (watched->state() == WorkState::failed) told(failure_of(watched->error()));
    });
}

std::vector<CommunicatorRecord> HostCommunicator::flight_record() const {
  engine_->records().request_state();
  return {engine_->records().record(Clock::now() + record_patience)};
}

// The first operation: what all ranks say of themselves, the slice size all can work with, and who shares memory with
// whom.
void HostCommunicator::introduce(const Mesh& mesh, std::size_t slice_bytes) {
  struct Introduction {
    std::uint64_t wish = 0;
    std::uint64_t random = 0;  // rank 0's makes the communicator's number
    std::int64_t pid = 0;
    std::int64_t job_rank = no_job_rank;
    std::int64_t memory_leader = 0;
  };
  constexpr std::size_t words = sizeof(Introduction) / sizeof(std::uint64_t);
  constexpr std::uint64_t shared_memory_bit = std::uint64_t{1} << 63;
  constexpr std::uint64_t far_bit = std::uint64_t{1} << 62;
  constexpr std::uint64_t local_bit = std::uint64_t{1} << 61;
  constexpr std::uint64_t direct_bit = std::uint64_t{1} << 60;
  constexpr std::uint64_t bits = shared_memory_bit | far_bit | local_bit | direct_bit;
  const bool all_shared = std::all_of(mesh.peers.begin(), mesh.peers.end(), [](const PeerConnections& connections) {
    return connections.peer < 0 || connections.shared_memory_bytes > 0;
  });
  const auto leader = std::ranges::find_if(mesh.peers, [](const PeerConnections& connections) {
    return connections.peer < 0 || connections.shared_memory_bytes > 0;
  });
  const bool is_local = options_.local_completion.value_or(Env::read().local_completion);
  const auto job_rank = job_rank_of(options_);
  if (job_rank) set_log_rank(static_cast<int>(*job_rank));
  const Introduction mine{slice_bytes | (all_shared ? shared_memory_bit : 0) | (engine_->group().is_far ? far_bit : 0) |
                              (is_local ? local_bit : 0) | (moves_directly(engine_->group()) ? direct_bit : 0),
                          random_number(), ::getpid(), job_rank.value_or(no_job_rank), leader - mesh.peers.begin()};
  std::vector<Introduction> all(static_cast<std::size_t>(options_.size), mine);
  std::vector<Buffer> outputs;
  for (auto& one : all) outputs.push_back({&one, words, DType::int64, nullptr});
  const Buffer own = outputs[options_.rank];
  CallOptions call;
  call.timeout = options_.connect_timeout;
  all_gather(std::move(outputs), own, call)->wait();
  Group& agreed = engine_->group();
  agreed.slice_bytes = slice_bytes;
  agreed.is_direct = true;
  std::vector<PeerIdentity> identities;
  for (const Introduction& one : all) {
    agreed.all_shared_memory &= (one.wish & shared_memory_bit) != 0;
    agreed.is_far |= (one.wish & far_bit) != 0;
    agreed.is_direct &= (one.wish & direct_bit) != 0;
    agreed.slice_bytes = std::min<std::size_t>(agreed.slice_bytes, one.wish & ~bits);
    const std::size_t rank = identities.size();
    agreed.memory_leaders.push_back(static_cast<int>(one.memory_leader));
    agreed.cluster_leaders.push_back(cluster_leader(options_.clusters, rank));
    if ((one.wish & local_bit) != (all.front().wish & local_bit))
      throw UsageError("communicator '" + options_.name + "': of rank " + std::to_string(agreed.label(0)) +
                       " and rank " + std::to_string(agreed.label(static_cast<int>(rank))) +
                       " only one ends operations with a root by itself; give every rank the same local_completion "
                       "(HOLMES_LOCAL_COMPLETION)");
    PeerIdentity identity{rank < mesh.hosts.size() ? mesh.hosts[rank] : "", mesh.peers[rank].nic, one.pid, {}};
    if (one.job_rank != no_job_rank) identity.job_rank = static_cast<int>(one.job_rank);
    identities.push_back(std::move(identity));
  }
  agreed.local_completion = is_local;
  agreed.takes_short = options_.size > 1 && options_.size <= ShortCall::most_ranks &&
                       std::ranges::all_of(agreed.channels, [](const auto& one) { return !one || one->takes_short(); });
  engine_->records().set_identities(all.front().random, std::move(identities));
}

}  // namespace holmes
