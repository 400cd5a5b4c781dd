// A stream over one TCP connection: what comes behind a small piece is read with it and lost to nobody.
#include "holmes/transport/tcp_channel.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "rail_sockets.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

struct Ends {
  std::unique_ptr<TcpChannel> sender, receiver;

  Ends() {
    auto [from, to] = tcp_pair();
    sender = std::make_unique<TcpChannel>(1, mesh_socket(std::move(from), 0));
    receiver = std::make_unique<TcpChannel>(0, mesh_socket(std::move(to), 0));
  }
};

// Whether a rank that waits for input would sleep now.
bool would_sleep(TcpChannel& channel) {
  std::vector<pollfd> fds;
  if (!channel.prepare_wait(/*for_recv=*/true, /*for_send=*/false, fds)) return false;
  const bool sleeps = ::poll(fds.data(), fds.size(), 0) == 0;
  channel.finish_wait(Clock::now(), fds);
  return sleeps;
}

// Small and large pieces, sent and received in other parts, are the same bytes; and nobody sleeps beside what is there.
void check_bytes() {
  std::mt19937 random(1);
  Ends ends;
  std::vector<std::byte> sent, received;
  const auto size = [&] { return std::size_t{1} << random() % 18; };
  for (int i = 0; i < 4000; ++i) {
    std::vector<std::byte> data(1 + random() % size());
    for (std::byte& byte : data) byte = static_cast<std::byte>(random());
    const std::size_t first = random() % data.size();
    const std::array pieces{iovec{data.data(), first}, iovec{data.data() + first, data.size() - first}};
    const std::size_t taken = ends.sender->try_send(pieces);
    sent.insert(sent.end(), data.begin(), data.begin() + static_cast<std::ptrdiff_t>(taken));
    for (std::size_t part = random() % 4; part-- > 0 && received.size() < sent.size();) {
      CHECK(!would_sleep(*ends.receiver));
      std::vector<std::byte> into(1 + random() % size());
      const std::size_t begin = random() % into.size();
      const std::array room{iovec{into.data(), begin}, iovec{into.data() + begin, into.size() - begin}};
      const std::size_t came = ends.receiver->try_recv(room);
      CHECK(came > 0);
      received.insert(received.end(), into.begin(), into.begin() + static_cast<std::ptrdiff_t>(came));
      CHECK(ends.receiver->received_bytes() == received.size());
    }
  }
  while (received.size() < sent.size()) {
    std::array<std::byte, 1000> into;
    const iovec room{into.data(), into.size()};
    const std::size_t came = ends.receiver->try_recv({&room, 1});
    received.insert(received.end(), into.begin(), into.begin() + static_cast<std::ptrdiff_t>(came));
  }
  CHECK(received == sent);
  CHECK(would_sleep(*ends.receiver));
}

// Messages that were sent before their receiver came take one system call together.
void check_few_calls() {
  Ends ends;
  std::array<std::byte, 64> message{};
  const iovec piece{message.data(), message.size()};
  for (int i = 0; i < 10; ++i) CHECK(ends.sender->try_send({&piece, 1}) == message.size());
  CHECK(ends.receiver->try_recv({&piece, 1}) == message.size());
  std::vector<pollfd> fds;
  CHECK(!ends.receiver->prepare_wait(true, false, fds));
  CHECK(fds.size() == 1 && ::poll(fds.data(), fds.size(), 0) == 0);  // the socket is empty
  CHECK(ends.receiver->prepare_wait(false, false, fds));             // nobody asks
}

// What a peer sent before it left comes before its end.
void check_end() {
  Ends ends;
  std::array<std::byte, 64> message{};
  const iovec piece{message.data(), message.size()};
  for (int i = 0; i < 3; ++i) CHECK(ends.sender->try_send({&piece, 1}) == message.size());
  ends.sender->shutdown();
  for (int i = 0; i < 3; ++i) CHECK(ends.receiver->try_recv({&piece, 1}) == message.size());
  bool is_closed = false;
  try {
    ends.receiver->try_recv({&piece, 1});
  } catch (const StreamClosed& closed) {
    is_closed = closed.peer == 0 && closed.system_errno == 0;
  }
  CHECK(is_closed);
}

}  // namespace

int main() {
  check_bytes();
  check_few_calls();
  check_end();
  return result("test_tcp_channel");
}
