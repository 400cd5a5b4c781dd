// A short call or message of which the socket takes a part: the rest goes later, and is the same bytes.
#include <sys/socket.h>

#include <array>
#include <vector>

#include "check.hpp"
#include "holmes/collectives/exchange.hpp"
#include "holmes/collectives/short_exchange.hpp"
#include "holmes/p2p/p2p.hpp"
#include "holmes/transport/tcp_channel.hpp"
#include "rail_sockets.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

int calls_in_part = 0;
int messages_in_part = 0;

// Two ranks, as both see them; what one sends fills its socket soon.
struct Pair {
  Group left, right;

  Pair() {
    auto [from, to] = tcp_pair();
    const int least = 1;
    CHECK(::setsockopt(from.get(), SOL_SOCKET, SO_SNDBUF, &least, sizeof least) == 0);
    const auto set_up = [](Group& group, int rank, UniqueFd fd) {
      group.rank = rank;
      group.size = 2;
      group.name = "test";
      group.all_shared_memory = false;
      group.local_completion = true;
      group.channels.resize(2);
      group.controls.resize(2);
      group.channels[static_cast<std::size_t>(1 - rank)] =
          std::make_unique<TcpChannel>(1 - rank, mesh_socket(std::move(fd), 0));
    };
    set_up(left, 0, std::move(from));
    set_up(right, 1, std::move(to));
  }
};

std::vector<std::uint8_t> bytes_of(int number, std::size_t size) {
  std::vector<std::uint8_t> bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::uint8_t>(static_cast<std::size_t>(number) * 31 + i * 7);
  return bytes;
}

Signature broadcast_of(std::size_t bytes, std::uint64_t sequence) {
  Signature signature{
      .op = OpCode::broadcast, .dtype = DType::uint8, .reduction = {}, .root = 0, .count = bytes, .whole = {}};
  signature.sequence = sequence;
  return signature;
}

std::unique_ptr<Collective> exchange(Group& group, std::vector<std::uint8_t>& data, std::uint64_t sequence) {
  std::vector<Buffer> sends = no_data(DType::uint8, 2);
  std::vector<Buffer> recvs = sends;
  (group.rank == 0 ? sends[1] : recvs[0]) = {data.data(), data.size(), DType::uint8, nullptr};
  return std::make_unique<Exchange>(group, broadcast_of(data.size(), sequence), std::make_shared<Work>(),
                                    Clock::now() + std::chrono::seconds(60), std::move(sends), std::move(recvs));
}

// Broadcasts until one goes in part; that one goes on as the collective that it is. The receiver's headers are owed.
void a_call(int seed) {
  Pair pair;
  pair.left.owed = {0, 1};
  std::vector<std::vector<std::uint8_t>> sent;
  std::unique_ptr<Collective> rest;
  for (int number = 0; !rest; ++number) {
    CHECK(number < 1000);
    auto& data =
        sent.emplace_back(bytes_of(number, static_cast<std::size_t>(1000 + (number * 37 + seed * 101) % 1000)));
    ShortExchange call(pair.left, broadcast_of(data.size(), static_cast<std::uint64_t>(number)));
    call.set(0, data.data(), data.size(), data.data(), data.size());
    call.set(1, data.data(), data.size(), nullptr, 0);
    CHECK(call.has_room());
    if (call.send()) continue;
    const std::vector<std::size_t> gone = call.gone_bytes();
    CHECK(gone[1] < collective_header_bytes + data.size());
    calls_in_part += gone[1] > 0;
    rest = exchange(pair.left, data, static_cast<std::uint64_t>(number));
    rest->set_gone(gone);
    rest->start();
  }
  for (std::size_t number = 0; number < sent.size(); ++number) {
    std::vector<std::uint8_t> data(sent[number].size());
    const auto received = exchange(pair.right, data, number);
    received->start();
    const auto until = Clock::now() + std::chrono::seconds(20);
    while (!received->is_done() && Clock::now() < until) received->advance(), rest->advance();
    CHECK(received->is_done() && data == sent[number]);
    if (!received->is_done()) return;
  }
  CHECK(rest->has_sent_all());
}

// Messages until one goes in part; the rest of that one is pending, and nothing else is.
void a_message(int seed) {
  Pair pair;
  std::vector<std::unique_ptr<Channel>> left(2), right(2);
  left[1] = std::move(pair.left.channels[1]);
  right[0] = std::move(pair.right.channels[0]);
  P2pEngine sender(pair.left, std::move(left), -1);
  P2pEngine receiver(pair.right, std::move(right), -1);
  const auto deadline = Clock::now() + std::chrono::seconds(60);
  std::vector<std::vector<std::uint8_t>> sent;
  bool refused = false;
  while (sender.pending() == 0 && !refused) {
    const int number = static_cast<int>(sent.size());
    CHECK(number < 1000);
    auto data = bytes_of(number, static_cast<std::size_t>(1000 + (number * 37 + seed * 101) % 1000));
    const ShortMessage message{true, data.data(), data.size(), DType::uint8, 1, 7, {}};
    CHECK(sender.state_of(message) == ShortState::ready);
    refused = !sender.carry(message, deadline);
    if (!refused) sent.push_back(data);
    std::fill(data.begin(), data.end(), std::uint8_t{0});  // its memory is the caller's again
  }
  CHECK(sender.pending() == (refused ? 0 : 1));
  if (sender.pending() > 0) {
    ++messages_in_part;
    const ShortMessage next{true, sent[0].data(), 1, DType::uint8, 1, 7, {}};
    CHECK(sender.state_of(next) == ShortState::barred);  // it goes behind the rest
  }
  for (const auto& expected : sent) {
    std::vector<std::uint8_t> data(expected.size());
    const ShortMessage message{false, data.data(), data.size(), DType::uint8, 0, 7, {}};
    const auto until = Clock::now() + std::chrono::seconds(20);
    while (receiver.state_of(message) == ShortState::awaited && Clock::now() < until) sender.advance();
    CHECK(receiver.state_of(message) == ShortState::ready);
    if (receiver.state_of(message) != ShortState::ready) return;
    CHECK(receiver.carry(message, deadline));
    CHECK(data == expected);
  }
  CHECK(sender.pending() == 0 && sender.messages(1).sent == sent.size());
}

}  // namespace

int main() {
  for (int i = 0; i < 20; ++i) {
    a_call(i);
    a_message(i);
  }
  std::printf("in part: %d calls, %d messages\n", calls_in_part, messages_in_part);
  CHECK(calls_in_part > 0 && messages_in_part > 0);
  return result("test_short_partial");
}
