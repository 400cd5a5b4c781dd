// Checks of every operation of a communicator, against what plain loops compute.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <span>

#include "ranks.hpp"

namespace holmes::test {

// What fills memory that nobody else knows yet: most of a test's time under the thread sanitizer, were it instrumented.
#define OWN_MEMORY [[gnu::no_sanitize("thread")]]

OWN_MEMORY inline std::int64_t value(int rank, std::size_t index) {
  return static_cast<std::int64_t>(index * 7 + 1) * (rank + 1) % 1000003;
}

OWN_MEMORY inline std::int64_t sum_value(int size, std::size_t index) {
  std::int64_t sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += value(rank, index);
  return sum;
}

OWN_MEMORY inline void fill(std::int64_t* to, std::size_t count, std::int64_t (*of)(int, std::size_t), int who,
                            std::size_t first) {
  for (std::size_t i = 0; i < count; ++i) to[i] = of(who, first + i);
}

inline std::vector<std::int64_t> values(int rank, std::size_t count, std::size_t first = 0) {
  std::vector<std::int64_t> result(count);
  fill(result.data(), count, value, rank, first);
  return result;
}

inline std::vector<std::int64_t> sum_values(int size, std::size_t count, std::size_t first = 0) {
  std::vector<std::int64_t> result(count);
  fill(result.data(), count, sum_value, size, first);
  return result;
}

inline void check_all_reduce(Communicator& comm, std::size_t count) {
  auto data = values(comm.rank(), count);
  comm.all_reduce(buffer(data, DType::int64), ReduceOp::sum)->wait();
  CHECK(data == sum_values(comm.size(), count));
}

inline void check_reduce_scatter(Communicator& comm, std::size_t count) {
  const auto size = static_cast<std::size_t>(comm.size());
  auto input = values(comm.rank(), count * size);
  std::vector<std::int64_t> output(count);
  std::vector<Buffer> inputs;
  for (std::size_t r = 0; r < size; ++r) inputs.push_back(part(input, r * count, count, DType::int64));
  comm.reduce_scatter(buffer(output, DType::int64), inputs, ReduceOp::sum)->wait();
  const std::size_t first = static_cast<std::size_t>(comm.rank()) * count;
  CHECK(output == sum_values(comm.size(), count, first));
}

inline void check_all_gather(Communicator& comm, std::size_t count) {
  // Uneven: rank r gives count + r elements.
  const auto size = static_cast<std::size_t>(comm.size());
  std::vector<std::vector<std::int64_t>> outputs(size);
  std::vector<Buffer> buffers;
  for (std::size_t r = 0; r < size; ++r) {
    outputs[r].assign(count + r, -1);
    buffers.push_back(buffer(outputs[r], DType::int64));
  }
  auto input = values(comm.rank(), count + static_cast<std::size_t>(comm.rank()));
  comm.all_gather(buffers, buffer(input, DType::int64))->wait();
  for (std::size_t r = 0; r < size; ++r) CHECK(outputs[r] == values(static_cast<int>(r), count + r));
}

inline void check_rooted(Communicator& comm, std::size_t count, int root) {
  const auto size = static_cast<std::size_t>(comm.size());
  auto data = values(comm.rank(), count);
  comm.broadcast(buffer(data, DType::int64), root)->wait();
  CHECK(data == values(root, count));

  data = values(comm.rank(), count);
  comm.reduce(buffer(data, DType::int64), root, ReduceOp::sum)->wait();
  CHECK(data == (comm.rank() == root ? sum_values(comm.size(), count) : values(comm.rank(), count)));

  std::vector<std::int64_t> all(count * size);
  std::vector<Buffer> parts;
  for (std::size_t r = 0; r < size; ++r) parts.push_back(part(all, r * count, count, DType::int64));
  data = values(comm.rank(), count);
  comm.gather(comm.rank() == root ? parts : std::vector<Buffer>{}, buffer(data, DType::int64), root)->wait();
  for (std::size_t r = 0; r < size && comm.rank() == root; ++r)
    CHECK(std::ranges::equal(std::span(all).subspan(r * count, count), values(static_cast<int>(r), count)));

  std::iota(all.begin(), all.end(), 5);
  comm.scatter(buffer(data, DType::int64), comm.rank() == root ? parts : std::vector<Buffer>{}, root)->wait();
  for (std::size_t i = 0; i < count; ++i)
    CHECK(data[i] == static_cast<std::int64_t>(5 + static_cast<std::size_t>(comm.rank()) * count + i));
}

inline void check_all_to_all(Communicator& comm, std::size_t count) {
  const auto size = static_cast<std::size_t>(comm.size());
  auto input = values(comm.rank(), count * size);
  std::vector<std::int64_t> output(count * size);
  std::vector<Buffer> in;
  std::vector<Buffer> out;
  for (std::size_t r = 0; r < size; ++r) {
    in.push_back(part(input, r * count, count, DType::int64));
    out.push_back(part(output, r * count, count, DType::int64));
  }
  comm.all_to_all(out, in)->wait();
  const std::size_t first = static_cast<std::size_t>(comm.rank()) * count;
  for (std::size_t r = 0; r < size; ++r)
    CHECK(std::ranges::equal(std::span(output).subspan(r * count, count), values(static_cast<int>(r), count, first)));
}

inline void check_p2p(Communicator& comm, std::size_t count) {
  if (comm.size() < 2) return;
  // A ring in which everybody sends first, and two tags received in the other order.
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  auto first = values(comm.rank(), count);
  auto second = values(comm.rank(), count, 100);
  std::vector<std::int64_t> got_first(count);
  std::vector<std::int64_t> got_second(count);
  const auto works = comm.batch({{true, buffer(first, DType::int64), next, 1},
                                 {true, buffer(second, DType::int64), next, 2},
                                 {false, buffer(got_second, DType::int64), previous, 2},
                                 {false, buffer(got_first, DType::int64), previous, 1}},
                                {.timeout = {}, .async = true});
  for (const auto& work : works) work->wait();
  CHECK(got_first == values(previous, count));
  CHECK(got_second == values(previous, count, 100));
}

// Rank 0 receives a message of each from anyone.
inline void check_from_anyone(Communicator& comm, std::size_t count) {
  auto sent = values(comm.rank(), count);
  std::vector<std::int64_t> got(count);
  if (comm.rank() == 0) {
    for (int peer = 1; peer < comm.size(); ++peer) {
      const auto work = comm.recv_any(buffer(got, DType::int64), 9);
      work->wait();
      CHECK(work->source_rank() > 0 && work->source_rank() < comm.size());
      CHECK(got == values(work->source_rank(), count));
    }
  } else {
    comm.send(buffer(sent, DType::int64), 0, 9)->wait();
  }
}

inline void check_async(Communicator& comm, std::size_t count) {
  // Several operations in flight, finished in order.
  std::vector<std::vector<std::int64_t>> data;
  for (int i = 0; i < 6; ++i) data.push_back(values(comm.rank() + i, count));
  std::vector<WorkPtr> works;
  for (auto& item : data)
    works.push_back(comm.all_reduce(buffer(item, DType::int64), ReduceOp::max, {.timeout = {}, .async = true}));
  comm.barrier()->wait();
  for (std::size_t i = 0; i < works.size(); ++i) {
    works[i]->wait();
    CHECK(works[i]->state() == WorkState::completed);
    for (std::size_t k = 0; k < count; ++k) {
      std::int64_t largest = 0;
      for (int r = 0; r < comm.size(); ++r) largest = std::max(largest, value(r + static_cast<int>(i), k));
      CHECK(data[i][k] == largest);
    }
  }
}

inline void check_split(Communicator& comm) {
  const auto part = comm.split(comm.rank() % 2, -comm.rank());
  const int expected = comm.rank() % 2 == 0 ? (comm.size() + 1) / 2 : comm.size() / 2;
  CHECK(part->size() == expected);
  std::vector<std::int64_t> data = {comm.rank()};
  part->all_reduce(buffer(data, DType::int64), ReduceOp::sum)->wait();
  std::int64_t sum = 0;
  for (int r = comm.rank() % 2; r < comm.size(); r += 2) sum += r;
  CHECK(data[0] == sum);
}

// `is_wide`: its ranks are not all connected.
inline void check_operations(Communicator& comm, std::initializer_list<std::size_t> counts, bool is_wide) {
  for (const std::size_t count : counts) {
    check_all_reduce(comm, count);
    check_reduce_scatter(comm, count);
    check_all_gather(comm, count);
    check_rooted(comm, count, comm.size() - 1);
    check_all_to_all(comm, count);
    check_p2p(comm, count);
    if (!is_wide) check_from_anyone(comm, count);
    check_async(comm, count / 4);
  }
}

inline void check_everything(Communicator& comm, bool is_wide = false) {
  check_operations(comm, {0, 1, 7, 1000, 8193, 40001, 300007}, is_wide);
  check_split(comm);
}

}  // namespace holmes::test
