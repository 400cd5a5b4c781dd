// The handshake against who recorded one, and who reflects it.
#include "holmes/bootstrap/handshake.hpp"

#include <sys/socket.h>

#include "check.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

const std::string secret = "the secret of the job";

std::string anybody(const Hello&) { return ""; }

// Two connected sockets, and what one side said on them.
struct Wire {
  UniqueFd left, right;
  Wire() {
    int fds[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    left.reset(fds[0]), right.reset(fds[1]);
  }
};

std::string received(int fd) {
  std::string bytes(4096, '\0');
  const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
  bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return bytes;
}

void say(int fd, const std::string& bytes) {
  CHECK(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == std::ssize(bytes));
}

struct Recording {
  std::string connecting, listening;  // all that each side said
  std::string key;
};

// A genuine handshake, tapped.
Recording record() {
  Wire near, far;
  Hello hello;
  hello.rank = 1;
  auto connecting = Handshake::connecting(hello, 0, secret, false);
  auto listening = Handshake::listening(0, secret, anybody);
  Recording recording;
  auto connect_step = Handshake::Step::waiting, listen_step = Handshake::Step::waiting;
  for (int i = 0; i < 4; ++i) {
    connect_step = connecting.step(near.left.get());
    const auto said = received(near.right.get());
    recording.connecting += said;
    if (!said.empty()) say(far.right.get(), said);
    listen_step = listening.step(far.left.get());
    if (listen_step == Handshake::Step::verified) {
      listening.confirm(std::nullopt);
      listen_step = listening.step(far.left.get());
    }
    const auto answer = received(far.right.get());
    recording.listening += answer;
    if (!answer.empty()) say(near.right.get(), answer);
  }
  CHECK(connect_step == Handshake::Step::done && listen_step == Handshake::Step::done);
  recording.key = connecting.connection_key();
  CHECK(recording.key == listening.connection_key() && recording.key.size() == 32);
  CHECK(recording.connecting.size() == hello_bytes + 32 && recording.listening.size() == hello_bytes + 32);
  return recording;
}

void test_replay() {
  const auto recording = record();
  {  // to a rank that listens
    Wire wire;
    auto listening = Handshake::listening(0, secret, anybody);
    say(wire.right.get(), recording.connecting);
    CHECK(listening.step(wire.left.get()) == Handshake::Step::failed);
    CHECK(contains(listening.failure(), "proof of the secret is wrong"));
  }
  {  // to a rank that connects
    Wire wire;
    Hello hello;
    hello.rank = 1;
    auto connecting = Handshake::connecting(hello, 0, secret, false);
    say(wire.right.get(), recording.listening);
    CHECK(connecting.step(wire.left.get()) == Handshake::Step::failed);
    CHECK(contains(connecting.failure(), "proof of the secret is wrong"));
  }
}

// A rank that connects is sent back what it says, as if the other side knew the secret too.
void test_reflection() {
  Wire wire;
  Hello hello;
  auto connecting = Handshake::connecting(hello, 0, secret, false);
  CHECK(connecting.step(wire.left.get()) == Handshake::Step::waiting);
  say(wire.right.get(), received(wire.right.get()));
  CHECK(connecting.step(wire.left.get()) == Handshake::Step::waiting);
  say(wire.right.get(), received(wire.right.get()));
  CHECK(connecting.step(wire.left.get()) == Handshake::Step::failed);
  CHECK(contains(connecting.failure(), "proof of the secret is wrong"));
}

// Who listens says nothing that depends on the secret to a peer that has not proved it.
void test_the_listener_proves_last() {
  Wire wire;
  Hello hello;
  hello.rank = 1;
  auto listening = Handshake::listening(0, secret, anybody);
  say(wire.right.get(), hello.encode());
  CHECK(listening.step(wire.left.get()) == Handshake::Step::waiting);
  CHECK(received(wire.right.get()).size() == hello_bytes);
  say(wire.right.get(), std::string(32, 'x'));
  CHECK(listening.step(wire.left.get()) == Handshake::Step::failed);
  CHECK(received(wire.right.get()).empty());
}

// The numbers of streams travel behind the rail.
void test_streams_in_a_hello() {
  Hello hello;
  hello.purpose = Purpose::p2p;
  hello.rail = 5;
  constexpr std::size_t purpose_at = 10;  // behind "HOLMES\r\n" and the version
  CHECK(hello.encode().at(purpose_at) == 2 && hello.encode().at(purpose_at + 1) == 5);
  for (int streams = 1; streams <= max_far_streams; ++streams)
    for (int stream = 0; stream < max_far_streams; ++stream) {
      hello.streams = static_cast<std::uint8_t>(streams);
      hello.stream = static_cast<std::uint8_t>(stream);
      const auto read = Hello::decode(hello.encode());
      CHECK(read && read->purpose == Purpose::p2p && read->rail == 5);
      CHECK(read->streams == streams && read->stream == stream);
    }
  Wire wire;
  hello.stream = 1;
  auto connecting = Handshake::connecting(hello, 0, secret, false);
  CHECK(connecting.step(wire.left.get()) == Handshake::Step::waiting);
  auto other = hello;
  other.stream = 2;
  say(wire.right.get(), other.encode());
  CHECK(connecting.step(wire.left.get()) == Handshake::Step::failed);
  CHECK(contains(connecting.failure(), "another connection"));
}

// Keys of two connections have nothing in common.
void test_keys_differ() { CHECK(record().key != record().key); }

}  // namespace

int main() {
  test_streams_in_a_hello();
  test_replay();
  test_reflection();
  test_the_listener_proves_last();
  test_keys_differ();
  return result("test_handshake");
}
