// Receives that take what comes, up to their buffer's size.
#include "holmes/comm/host_communicator.hpp"
#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr std::size_t most_bytes = 1 << 20;

HostCommunicator& host(Communicator& comm) { return dynamic_cast<HostCommunicator&>(comm); }

unsigned char value(std::size_t message, std::size_t at) { return static_cast<unsigned char>(message * 37 + at * 11); }

// Messages of many sizes, received in order; what is behind a message in its buffer stays as it was.
void exchange(Communicator& comm, bool posts_first) {
  const std::vector<std::size_t> sizes{0, 1, 100, 4096, 100'000, most_bytes, 0, 7};
  const int peer = 1 - comm.rank();
  std::vector<std::vector<unsigned char>> buffers;
  std::vector<WorkPtr> works;
  std::vector<unsigned char> other(1);
  CallOptions async;
  async.async = true;
  if (comm.rank() == 0) {
    if (posts_first) comm.barrier();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      auto& data = buffers.emplace_back(sizes[i]);
      for (std::size_t at = 0; at < data.size(); ++at) data[at] = value(i, at);
      works.push_back(comm.send(buffer(data, DType::uint8), peer, 5, async));
    }
    for (const auto& work : works) work->wait();
    if (!posts_first) comm.barrier();
    other[0] = 77;
    comm.send(buffer(other, DType::uint8), peer, 6)->wait();
    return;
  }
  std::vector<std::shared_ptr<std::size_t>> received;
  // With a receive of another tag open, messages that come early are kept.
  const WorkPtr last = comm.recv(buffer(other, DType::uint8), peer, 6, async);
  if (!posts_first) comm.barrier();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto& data = buffers.emplace_back(most_bytes, 255);
    received.push_back(std::make_shared<std::size_t>());
    works.push_back(host(comm).recv_up_to(buffer(data, DType::uint8), peer, 5, received.back(), async));
  }
  if (posts_first) comm.barrier();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    works[i]->wait();
    CHECK(*received[i] == sizes[i] && works[i]->source_rank() == peer);
    for (std::size_t at = 0; at < sizes[i]; ++at) CHECK(buffers[i][at] == value(i, at));
    for (std::size_t at = sizes[i]; at < most_bytes; ++at) CHECK(buffers[i][at] == 255);
  }
  last->wait();
  CHECK(other[0] == 77);
}

void run(Transport transport, int rails) {
  for (const bool posts_first : {true, false})
    run_communicators(
        2, transport,
        [&](Communicator& comm) {
          exchange(comm, posts_first);
          comm.barrier();
        },
        rails);
}

template <typename Error>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void test_refusals() {
  run_communicators(2, Transport::tcp, [](Communicator& comm) {
    std::vector<unsigned char> data(100);
    const int peer = 1 - comm.rank();
    if (comm.rank() == 0) {
      try {
        comm.send(buffer(data, DType::uint8), peer)->wait();
        comm.barrier();
      } catch (const HolmesError&) {
      }
      return;
    }
    const auto received = std::make_shared<std::size_t>();
    const auto longer = message_of<MismatchError>(
        [&] { host(comm).recv_up_to(part(data, 0, 99, DType::uint8), peer, 0, received, {})->wait(); });
    CHECK(longer.find("sent 100 bytes of uint8") != std::string::npos);
    CHECK(longer.find("takes at most 99 bytes of uint8") != std::string::npos);
  });
}

}  // namespace

int main() {
  for (const int rails : {1, 2}) run(Transport::tcp, rails);
  run(Transport::shm, 1);
  test_refusals();
  std::puts("test_short_messages: all checks passed");
}
