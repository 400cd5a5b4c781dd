// Every operation over clusters: equal and unequal ones, interleaved ranks, hierarchical from the first byte, from some
// size on, and as measured; every type and reduction against the flat form; compression.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>

#include "clusters.hpp"
#include "collective_checks.hpp"
#include "holmes/comm/hierarchical_communicator.hpp"
#include "holmes/transport/uplink.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

const std::vector<std::vector<int>> layouts = {
    {0, 0, 1, 1}, {0, 1, 1, 0}, {0, 0, 0, 1}, {7, 7, 3, 3, 3}, {0, 1, 0, 2, 1, 2}};

// Counts that make one piece and several.
void check_large(Communicator& comm) {
  check_all_reduce(comm, 700001);
  check_reduce_scatter(comm, 150001);
  check_rooted(comm, 400001, comm.size() / 2);
  const auto size = static_cast<std::size_t>(comm.size());
  const std::size_t count = 200003;
  auto input = values(comm.rank(), count);
  std::vector<std::int64_t> output(count * size);
  std::vector<Buffer> outputs;
  for (std::size_t r = 0; r < size; ++r) outputs.push_back(part(output, r * count, count, DType::int64));
  comm.all_gather(outputs, buffer(input, DType::int64))->wait();
  for (std::size_t r = 0; r < size; ++r)
    for (std::size_t i = 0; i < count; ++i) CHECK(output[r * count + i] == value(static_cast<int>(r), i));
}

// Blocks of as many elements as `counts` says, by rank: each rank has all of them, and the sum of its own over all.
void check_blocks(Communicator& comm, const std::vector<std::size_t>& counts, bool is_async) {
  const CallOptions call{.async = is_async};
  const auto own = static_cast<std::size_t>(comm.rank());
  const auto size = static_cast<std::size_t>(comm.size());
  std::vector<std::vector<std::int64_t>> gathered(size), given(size);
  std::vector<Buffer> outputs, inputs;
  for (std::size_t r = 0; r < size; ++r) {
    gathered[r].assign(counts[r], -1);
    given[r] = values(comm.rank(), counts[r], r * 1000);
    outputs.push_back(buffer(gathered[r], DType::int64));
    inputs.push_back(buffer(given[r], DType::int64));
  }
  auto input = values(comm.rank(), counts[own]);
  std::vector<std::int64_t> sum(counts[own], -1);
  const std::vector<WorkPtr> works = {comm.all_gather(outputs, buffer(input, DType::int64), call),
                                      comm.reduce_scatter(buffer(sum, DType::int64), inputs, ReduceOp::sum, call)};
  for (const auto& work : works) work->wait();
  for (std::size_t r = 0; r < size; ++r) CHECK(gathered[r] == values(static_cast<int>(r), counts[r]));
  CHECK(sum == sum_values(comm.size(), counts[own], own * 1000));
  for (std::size_t r = 0; r < size; ++r) CHECK(given[r] == values(comm.rank(), counts[r], r * 1000));
  // In place, and averages.
  comm.reduce_scatter(inputs[own], inputs, ReduceOp::sum, call)->wait();
  CHECK(given[own] == sum_values(comm.size(), counts[own], own * 1000));
  comm.all_gather(inputs, inputs[own], call)->wait();
  for (std::size_t r = 0; r < size; ++r) CHECK(given[r] == sum_values(comm.size(), counts[r], r * 1000));
  std::vector<std::vector<float>> ones(size);
  std::vector<Buffer> floats;
  for (std::size_t r = 0; r < size; ++r) {
    ones[r].assign(counts[r], static_cast<float>(comm.rank()));
    floats.push_back(buffer(ones[r], DType::float32));
  }
  comm.reduce_scatter(floats[own], floats, ReduceOp::avg, call)->wait();
  for (const float value : ones[own]) CHECK(std::abs(value - static_cast<float>(size - 1) / 2) < 1e-5F);
}

std::uint64_t bytes_sent_across(const Communicator& comm, const std::vector<int>& clusters) {
  std::uint64_t bytes = 0;
  for (const auto& connection : comm.connections())
    if (clusters[static_cast<std::size_t>(connection.peer)] != clusters[static_cast<std::size_t>(comm.rank())])
      bytes += connection.sent_bytes;
  return bytes;
}

// What crosses is what must: of an all_gather each block once to each other cluster.
void check_bytes_across(Communicator& comm, const std::vector<int>& clusters, const std::vector<std::size_t>& counts) {
  std::vector<std::vector<std::int64_t>> gathered(counts.size());
  std::vector<Buffer> outputs;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    gathered[r].resize(counts[r]);
    outputs.push_back(buffer(gathered[r], DType::int64));
  }
  comm.barrier()->wait();
  const std::uint64_t before = bytes_sent_across(comm, clusters);
  comm.all_gather(outputs, outputs[static_cast<std::size_t>(comm.rank())])->wait();
  std::vector<std::int64_t> crossed = {static_cast<std::int64_t>(bytes_sent_across(comm, clusters) - before)};
  comm.all_reduce(buffer(crossed, DType::int64), ReduceOp::sum)->wait();
  const std::set<int> names(clusters.begin(), clusters.end());
  const auto least = static_cast<std::int64_t>(total_bytes(outputs) * (names.size() - 1));
  CHECK(crossed[0] >= least);
  CHECK(crossed[0] < least + least / 10);
}

void check_uneven(const std::vector<int>& clusters) {
  std::vector<std::size_t> counts(clusters.size());
  for (const std::size_t scale : {1, 900, 40'000}) {
    for (std::size_t r = 0; r < counts.size(); ++r) counts[r] = scale * ((r * 5 + 2) % 4);
    for (const bool is_async : {false, true})
      run_clusters(clusters, 0, [&](Communicator& comm) { check_blocks(comm, counts, is_async); });
  }
  std::ranges::fill(counts, 50'001);
  run_clusters(clusters, 0, [&](Communicator& comm) {
    check_blocks(comm, counts, true);
    check_bytes_across(comm, clusters, counts);
  });
}

// Of a rank's blocks few are so large that the flat form is not behind; one has no more to send than one of many.
void check_what_saves() {
  const auto blocks = [](const std::vector<std::size_t>& counts) {
    std::vector<Buffer> result;
    for (const std::size_t count : counts) result.push_back({nullptr, count, DType::uint8});
    return result;
  };
  const auto saves = [&](const std::vector<int>& clusters, const std::vector<std::size_t>& counts) {
    return Hierarchy(clusters, 0).saves_crossings(blocks(counts));
  };
  CHECK(saves({0, 0, 1, 1}, {1, 1, 1, 1}));
  CHECK(saves({0, 0, 1, 1}, {9, 0, 1, 1}));
  CHECK(saves({0, 0, 1, 1, 1}, {1, 1, 1, 1, 1}));
  CHECK(!saves({0, 0, 0, 1}, {1, 1, 1, 1}));              // either way one rank has three blocks to receive
  CHECK(!saves({0, 0, 0, 0, 1, 2}, {1, 1, 1, 1, 1, 1}));  // one rank would send four blocks twice
  CHECK(!saves({0, 0, 0, 1, 1, 1}, {0, 0, 0, 0, 0, 0}));
  std::vector<int> clusters(10, 0);
  clusters.insert(clusters.end(), {1, 1});
  CHECK(!saves(clusters, std::vector<std::size_t>(12, 1)));  // five rounds
}

// The same bytes on all ranks: gathers a checksum.
void check_identical(Communicator& comm, const void* data, std::size_t bytes) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < bytes; ++i)
    sum = static_cast<std::int64_t>(static_cast<std::uint64_t>(sum) * 31 + static_cast<const unsigned char*>(data)[i]);
  std::vector<std::int64_t> smallest = {sum};
  std::vector<std::int64_t> largest = {sum};
  comm.all_reduce(buffer(smallest, DType::int64), ReduceOp::min)->wait();
  comm.all_reduce(buffer(largest, DType::int64), ReduceOp::max)->wait();
  CHECK(smallest == largest);
}

template <typename T>
void check_reduction_of(Communicator& comm, DType dtype, ReduceOp op, double expected, T one) {
  std::vector<T> data(70001, one);
  comm.all_reduce(buffer(data, dtype), op)->wait();
  for (const T value : data) CHECK(std::abs(static_cast<double>(value) - expected) <= 1e-6 * expected);
}

void check_reductions(Communicator& comm) {
  const double size = comm.size();
  check_reduction_of<float>(comm, DType::float32, ReduceOp::avg, 3, 3);
  check_reduction_of<double>(comm, DType::float64, ReduceOp::avg, 3, 3);
  check_reduction_of<double>(comm, DType::float64, ReduceOp::product, std::pow(2.0, size), 2);
  check_reduction_of<std::int32_t>(comm, DType::int32, ReduceOp::bor, 5, 5);
  check_reduction_of<std::int16_t>(comm, DType::int16, ReduceOp::min, 7, 7);
  check_reduction_of<std::uint8_t>(comm, DType::boolean, ReduceOp::sum, 1, 1);
  // The average of float16 does not overflow where the sum would: 0x7800 is 32768.
  std::vector<std::uint16_t> half(70001, 0x7800);
  comm.all_reduce(buffer(half, DType::float16), ReduceOp::avg)->wait();
  if ((comm.size() & (comm.size() - 1)) == 0)
    for (const auto value : half) CHECK(value == 0x7800);
  // Roundings differ between the forms; all ranks have the same bits.
  std::vector<float> data(70001);
  for (std::size_t i = 0; i < data.size(); ++i)
    data[i] = std::sin(static_cast<float>(i) + static_cast<float>(comm.rank()));
  comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum)->wait();
  check_identical(comm, data.data(), data.size() * sizeof(float));
  for (std::size_t i = 0; i < data.size(); ++i) {
    double sum = 0;
    for (int r = 0; r < comm.size(); ++r) sum += std::sin(static_cast<float>(i) + static_cast<float>(r));
    CHECK(std::abs(data[i] - sum) < 1e-5);
  }
}

// Different operations in flight at once, of both forms.
void check_mixed(Communicator& comm) {
  constexpr std::size_t count = 200000;
  const auto size = static_cast<std::size_t>(comm.size());
  for (int round = 0; round < 3; ++round) {
    auto first = values(comm.rank(), count);
    auto second = values(comm.rank(), count);
    auto small = values(comm.rank(), 10);
    auto third = values(comm.rank(), count);
    auto input = values(comm.rank(), count);
    std::vector<std::int64_t> gathered(count * size);
    std::vector<Buffer> outputs;
    for (std::size_t r = 0; r < size; ++r) outputs.push_back(part(gathered, r * count, count, DType::int64));
    const CallOptions async{.async = true};
    const std::vector<WorkPtr> works = {
        comm.broadcast(buffer(first, DType::int64), 1, async),
        comm.all_gather(outputs, buffer(input, DType::int64), async),
        comm.all_reduce(buffer(second, DType::int64), ReduceOp::sum, async),
        comm.all_reduce(buffer(small, DType::int64), ReduceOp::sum, async),
        comm.reduce(buffer(third, DType::int64), 0, ReduceOp::sum, async),
    };
    for (const auto& work : works) work->wait();
    CHECK(first == values(1, count));
    for (std::size_t i = 0; i < count; ++i) CHECK(second[i] == sum_value(comm.size(), i));
    for (std::size_t i = 0; i < small.size(); ++i) CHECK(small[i] == sum_value(comm.size(), i));
    if (comm.rank() == 0)
      for (std::size_t i = 0; i < count; ++i) CHECK(third[i] == sum_value(comm.size(), i));
    for (std::size_t i = 0; i < gathered.size(); ++i)
      CHECK(gathered[i] == value(static_cast<int>(i / count), i % count));
  }
}

void check_compression(Communicator& comm) {
  constexpr std::size_t count = 500001;
#if defined(__SANITIZE_THREAD__)
  constexpr int steps = 5;  // a minute with all
#else
  constexpr int steps = 20;
#endif
  std::vector<float> input(count);
  for (std::size_t i = 0; i < count; ++i)
    input[i] = std::sin(static_cast<float>(i % 1000)) * static_cast<float>(comm.rank() + 1);
  std::vector<float> data(count);
  for (const Codec codec : {Codec::bf16, Codec::int8, Codec::int8_rotated, Codec::int4_rotated}) {
    for (const bool error_feedback : {false, true}) {
      const auto compression =
          std::make_shared<Compression>(Compression::Settings{.codec = codec, .error_feedback = error_feedback});
      // With feedback of two steps; rotated, of all values of a block together.
      const double most = codec == Codec::int4_rotated ? 1.0 : codec == Codec::int8_rotated ? 1.0 / 20 : 1.0 / 60;
      double drift = 0;
      std::vector<double> total(100);
      for (int step = 0; step < steps; ++step) {
        std::memcpy(data.data(), input.data(), count * sizeof(float));
        comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum, {.compression = compression})->wait();
        const double scale = comm.size() * (comm.size() + 1) / 2;
        for (std::size_t i = 0; i < count; i += 97)
          CHECK(std::abs(data[i] - std::sin(static_cast<float>(i % 1000)) * scale) < scale * most);
        for (std::size_t i = 0; i < total.size(); ++i) total[i] += data[i];
        if (step == 0) check_identical(comm, data.data(), count * sizeof(float));
        for (std::size_t i = 0; i < total.size(); ++i)
          drift = std::max(drift, std::abs(total[i] - std::sin(static_cast<float>(i)) * scale * (step + 1)));
      }
      if (comm.rank() == 0)
        std::printf("%s%s %s feedback: largest error of a sum of %d steps %g\n", std::string(name(codec)).c_str(),
                    is_rotated(codec) ? " rotated" : "", error_feedback ? "with" : "without", steps, drift);
    }
  }
  // An infinity stays one, or becomes NaN; never finite.
  data.assign(count, 1);
  if (comm.rank() == 0) data[5] = INFINITY;
  comm.all_reduce(buffer(data, DType::float32), ReduceOp::avg,
                  {.compression = std::make_shared<Compression>(Compression::Settings{.codec = Codec::int8})})
      ->wait();
  CHECK(!std::isfinite(data[5]));
  CHECK(std::abs(data[count - 1] - 1) < 1e-5);
}

// Clusters of equal size: a reduce_scatter that is compressed over steps, and an all_gather of what it makes, whole and
// of differences, as of a sharded optimizer.
void check_compressed_shards(Communicator& comm) {
  constexpr std::size_t count = 100'003;
  const auto size = static_cast<std::size_t>(comm.size());
  const auto rank = static_cast<std::size_t>(comm.rank());
  std::vector<float> gradients(count * size), shard(count), values(count * size), mine(count);
  const auto gradient = [](std::size_t i) { return std::sin(static_cast<float>(i % 1000)); };
  for (std::size_t i = 0; i < gradients.size(); ++i) gradients[i] = gradient(i) * static_cast<float>(rank + 1);
  const auto parts = [&](std::vector<float>& whole) {
    std::vector<Buffer> buffers;
    for (std::size_t r = 0; r < size; ++r)
      buffers.push_back({whole.data() + r * count, count, DType::float32, nullptr});
    return buffers;
  };
  for (const Codec codec : {Codec::bf16, Codec::int8, Codec::int4_rotated}) {
    const double most = codec == Codec::int4_rotated ? 1.0 : 1.0 / 60;
    const auto scatter = std::make_shared<Compression>(Compression::Settings{.codec = codec, .error_feedback = true});
    const auto gather = std::make_shared<Compression>(
        Compression::Settings{.codec = codec, .error_feedback = true, .differences = true});
    const auto whole = std::make_shared<Compression>(Compression::Settings{.codec = codec});
    std::vector<double> total(100);
    std::ranges::fill(mine, 100.0F);
    for (int step = 1; step <= 5; ++step) {
      comm.reduce_scatter({shard.data(), count, DType::float32, nullptr}, parts(gradients), ReduceOp::avg,
                          {.compression = scatter})
          ->wait();
      const double scale = static_cast<double>(size + 1) / 2;
      for (std::size_t i = 0; i < count; i += 97)
        CHECK(std::abs(shard[i] - gradient(rank * count + i) * scale) < scale * most);
      for (std::size_t i = 0; i < total.size(); ++i) {
        total[i] += shard[i];
        CHECK(std::abs(total[i] - gradient(rank * count + i) * scale * step) < 2 * scale * most);
      }
      for (std::size_t i = 0; i < count; ++i) mine[i] -= 0.01F * shard[i];
      comm.all_gather(parts(values), {mine.data(), count, DType::float32, nullptr}, {.compression = gather})->wait();
      check_identical(comm, values.data(), values.size() * sizeof(float));
      // Of 100 the code alone would lose 0.4 (int8): only what changed goes over, and the first time all as it is.
      for (std::size_t i = 0; i < count; i += 97)
        CHECK(std::abs(values[rank * count + i] - mine[i]) <= (step == 1 ? 0 : 0.02 * scale * most));
      mine.assign(values.begin() + static_cast<std::ptrdiff_t>(rank * count),
                  values.begin() + static_cast<std::ptrdiff_t>((rank + 1) * count));
      comm.all_gather(parts(values), {shard.data(), count, DType::float32, nullptr}, {.compression = whole})->wait();
      check_identical(comm, values.data(), values.size() * sizeof(float));
      for (std::size_t i = 0; i < count; i += 97) CHECK(std::abs(values[rank * count + i] - shard[i]) < scale * most);
    }
  }
  // As the thread says, where it can be; and no longer.
  const auto before = exchange_thread_compression(std::make_shared<Compression>(Compression::Settings{}));
  CHECK(!before);
  std::vector<float> ones(count, 1.0F + 1.0F / 1024);
  comm.all_reduce(buffer(ones, DType::float32), ReduceOp::sum)->wait();
  CHECK(ones[7] == static_cast<float>(size));
  ones.assign(count, 1.0F + 1.0F / 1024);
  comm.all_reduce(buffer(ones, DType::float32), ReduceOp::max)->wait();
  CHECK(ones[7] == 1.0F + 1.0F / 1024);
  exchange_thread_compression(nullptr);
  comm.all_reduce(buffer(ones, DType::float32), ReduceOp::sum)->wait();
  CHECK(ones[7] == (1.0F + 1.0F / 1024) * static_cast<float>(size));
}

void check_measured(Communicator& comm, bool is_wide) {
  check_everything(comm, is_wide);
  auto& hierarchical = dynamic_cast<HierarchicalCommunicator&>(comm);
  std::vector<std::int64_t> bytes = {static_cast<std::int64_t>(hierarchical.min_bytes())};
  check_identical(comm, bytes.data(), sizeof bytes.front());
}

void check_fast_split(Communicator& comm) {
  // A part inside one cluster is an ordinary communicator on the cluster's NICs.
  const auto part = comm.split(comm.rank() < 2 ? 0 : 1, comm.rank());
  CHECK(dynamic_cast<HierarchicalCommunicator*>(part.get()) == nullptr);
  for (const auto& connection : part->connections()) CHECK(connection.local_address.starts_with("127.0.1."));
  check_everything(*part);
  const auto spanning = comm.split(0, -comm.rank());
  CHECK(dynamic_cast<HierarchicalCommunicator*>(spanning.get()) != nullptr);
  check_large(*spanning);
}

// Sends and receives between ranks of one cluster use its NICs, others the shared ones.
void check_nics_of_pairs(Communicator& comm, const std::vector<int>& clusters) {
  std::vector<P2pCall> calls;
  std::vector<std::vector<std::int64_t>> inputs(clusters.size());
  auto own = values(comm.rank(), 30001);
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    auto& input = inputs[static_cast<std::size_t>(peer)] = std::vector<std::int64_t>(own.size());
    calls.push_back({true, buffer(own, DType::int64), peer, 0});
    calls.push_back({false, buffer(input, DType::int64), peer, 0});
  }
  for (const auto& work : comm.batch(calls)) work->wait();
  const auto sent = [&] {
    std::vector<std::uint64_t> bytes(clusters.size());
    for (const auto& connection : comm.connections()) {
      if (connection.purpose != "p2p" || connection.sent_bytes == 0) continue;
      const auto peer = static_cast<std::size_t>(connection.peer);
      bytes[peer] += connection.sent_bytes;
      const bool inside = clusters[peer] == clusters[static_cast<std::size_t>(comm.rank())];
      CHECK(connection.local_address.starts_with(inside ? "127.0.1." : "127.0.0.1:"));
    }
    return bytes;
  };
  // The connection of a pair of a wide group is listed a moment after its first messages.
  auto sent_bytes = sent();
  for (int i = 0; i < 500 && std::ranges::count(sent_bytes, 0u) > 1; ++i, sent_bytes = sent())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    CHECK(inputs[static_cast<std::size_t>(peer)] == values(peer, own.size()));
    CHECK(sent_bytes[static_cast<std::size_t>(peer)] >= own.size() * sizeof(std::int64_t));
  }
}

// All flat: no parts for the hierarchy, the rest as ever.
void check_never(Communicator& comm) {
  CHECK(dynamic_cast<HierarchicalCommunicator*>(&comm) == nullptr);
  check_large(comm);
  std::vector<float> data(70001, 1);
  comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum,
                  {.compression = std::make_shared<Compression>(Compression::Settings{})})
      ->wait();
  for (const float value : data) CHECK(value == static_cast<float>(comm.size()));
  const auto part = comm.split(comm.rank() < 2 ? 0 : 1, comm.rank());
  for (const auto& connection : part->connections()) CHECK(connection.local_address.starts_with("127.0.1."));
}

// What waits for the path out of the cluster is told to the ranks beside the sender, over a group that has nothing to
// do just now, and its end too.
void check_turns() {
  const auto store = make_local_store();
  std::atomic<bool> is_heard{false};
  run_ranks(4, [&](int rank) {
    auto options = cluster_options({0, 0, 1, 1}, rank, 0);
    options.priority = 1;
    const auto gradients = make_communicator(store, options);
    options = cluster_options({0, 1}, rank / 2, 0);
    options.name = "pair" + std::to_string(rank % 2);
    options.priority = 3;
    const auto messages = make_communicator(store, options);
    gradients->barrier()->wait();
    const auto uplink = Uplink::of("lo");  // of all ranks: they are threads
    const auto until = [&](bool gives_way) {
      const auto end = Clock::now() + std::chrono::seconds(20);
      while (uplink->gives_way({1}, Clock::now()) != gives_way && Clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        uplink->hear(Clock::now());
      }
      CHECK(uplink->gives_way({1}, Clock::now()) == gives_way);
    };
    std::vector<std::int64_t> data(std::size_t{4} << 20);
    if (rank == 0) messages->send(buffer(data, DType::int64), 1)->wait();
    if (rank == 1) {
      until(true);
      is_heard = true;
      is_heard.notify_all();
    }
    if (rank >= 2) is_heard.wait(false);  // nobody drives the group meanwhile
    if (rank == 2) messages->recv(buffer(data, DType::int64), 0)->wait();
    gradients->barrier()->wait();
    until(false);
    gradients->barrier()->wait();
  });
}

}  // namespace

int main() {
  check_turns();
  check_what_saves();
  for (const auto& layout :
       {std::vector{0, 0, 1, 1}, {7, 7, 3, 3, 3}, {0, 1, 0, 0, 0, 1, 0}, {0, 1, 2, 2, 1, 0, 2, 2, 2}})
    check_uneven(layout);
  for (const auto& layout : layouts) {
    run_clusters(layout, 0, [](Communicator& comm) { check_everything(comm); });
    run_clusters(layout, 0, [](Communicator& comm) {
      check_large(comm);
      check_reductions(comm);
      check_mixed(comm);
    });
    run_clusters(layout, 100000, check_mixed);
    std::printf("%zu ranks: ok\n", layout.size());
  }
  run_clusters({0, 0, 1, 1}, 0, check_large,
               [](CommunicatorOptions& options) { options.transport = Transport::automatic; });
  run_clusters({0, 0, 1, 1}, 0, check_fast_split);
  run_clusters({0, 0, 1, 1}, std::nullopt, [](Communicator& comm) { check_measured(comm, false); });
  run_clusters({0, 0, 1, 1}, never_hierarchical, check_never);
  for (const auto& layout : layouts)
    for (const auto min_bytes : {std::uint64_t{0}, never_hierarchical})
      run_clusters(layout, min_bytes, [&](Communicator& comm) { check_nics_of_pairs(comm, layout); });
  // Without NICs of their own, the ranks of a cluster use the shared ones.
  run_clusters({0, 0, 1, 1}, 0, check_large, [](CommunicatorOptions& options) { options.cluster_nics.clear(); });
  run_clusters({0, 0, 1, 1, 1}, 0, check_compression);
  run_clusters({0, 1, 0, 1}, 0, check_compressed_shards);
  // Of many ranks: what all of them are in is wide, and so are the larger clusters.
  const auto make_wide = [](CommunicatorOptions& options) { options.wide_min_ranks = 4; };
#if defined(__SANITIZE_THREAD__)  // six minutes with all
  const std::vector<std::vector<int>> many = {{0, 0, 0, 0, 1, 1, 1, 1}};
#else
  const std::vector<std::vector<int>> many = {{0, 0, 0, 0, 1, 1, 1, 1, 1}, {7, 3, 7, 3, 3, 3, 7, 3, 3, 7, 5, 5}};
#endif
  for (const auto& layout : many) {
    const auto run = [&](std::uint64_t min_bytes, const std::function<void(Communicator&)>& body) {
      run_clusters(layout, min_bytes, body, make_wide);
    };
    run(0, [](Communicator& comm) { check_operations(comm, {1, 1000, 40001}, true); });
    run(100000, check_mixed);
    run(never_hierarchical, [&](Communicator& comm) {
      check_all_reduce(comm, 700001);
      check_reductions(comm);
      check_nics_of_pairs(comm, layout);
    });
    std::printf("%zu ranks, wide: ok\n", layout.size());
  }
  run_clusters({0, 0, 0, 0, 1, 1, 1}, std::nullopt, [](Communicator& comm) { check_measured(comm, true); }, make_wide);
  run_clusters({0, 0, 0, 0, 1, 1, 1, 1}, 0, check_compression, make_wide);
  return 0;
}
