// Frames of a control connection, in any cut.
#include "fuzz.hpp"
#include "holmes/group/control_connection.hpp"

using namespace holmes;
using namespace holmes::fuzz;

namespace {

struct Line {
  UniqueFd peer;
  std::unique_ptr<ControlConnection> connection;
};

Line line() {
  auto [own, peer] = socket_pair();
  std::vector<Connection> sockets;
  sockets.push_back({.fd = std::move(own)});
  return {std::move(peer), std::make_unique<ControlConnection>(1, "b1", "eth0", std::move(sockets))};
}

}  // namespace

std::vector<std::string> fuzz::seeds() {
  const auto sent = [](const auto& send) {
    Line one = line();
    send(*one.connection);
    return drain(one.peer.get());
  };
  Failure failure{ErrorKind::timeout, "the deadline passed", {.rank = 1, .peer = 2, .host = "b1", .nic = "eth0"}};
  std::vector<std::string> all = {
      sent([](ControlConnection& connection) { connection.send_doorbell(); }),
      sent([](ControlConnection& connection) { connection.send_bye(); }),
      sent([](ControlConnection& connection) { connection.send_probe({1, {}}); }),
      sent([](ControlConnection& connection) {
        connection.send_probe({2, WholeQuestion{7, 3, WholeProgress::longest_lease}});
      }),
      sent([](ControlConnection& connection) { connection.send_probe_reply({77, 1, "eth0", 2, {8, 7, true}}); }),
      sent([](ControlConnection& connection) { connection.send_turn({{3, 15}, 0, Uplink::lease}); }),
      sent([&](ControlConnection& connection) { connection.send_abort(failure); })};
  std::string together;
  for (auto& one : all) together += one, one.insert(0, 1, '\x40');
  all.push_back('\7' + together);
  return all;
}

// First byte: bytes that come at once.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Input input(bytes, size);
  const std::size_t step = 1 + input.byte();
  Line one = line();
  bool has_failed = false;
  for (int rounds = 0; !input.empty() && !has_failed && rounds < 200; ++rounds) {
    feed(one.peer.get(), input.text(step));
    const auto failure = one.connection->drain();
    has_failed = failure.has_value();
    if (failure) {
      REQUIRE(failure->message.size() <= 8192);
      try {
        throw_error(failure->kind, failure->message, failure->context);
      } catch (const HolmesError&) {
      }
    }
    const auto probe = one.connection->take_probe();
    REQUIRE(!probe || !probe->whole || probe->whole->lease <= WholeProgress::longest_lease);
    for (const Turn& turn : one.connection->take_turns())
      REQUIRE(turn.lease <= Uplink::lease && turn.of.priority >= 0 && turn.of.turn.value_or(0) >= 0);
  }
  if (has_failed) return 0;
  one.peer.reset();
  one.connection->drain();
  REQUIRE(one.connection->is_closed());
  return 0;
}
