// The handshake, both sides. First byte: which side, whether the peer knows the secret.
#include "fuzz.hpp"
#include "holmes/bootstrap/handshake.hpp"
#include "holmes/core/error.hpp"

using namespace holmes;
using namespace holmes::fuzz;

namespace {

const std::string secret = "the secret of the job";

std::string check(const Hello& hello) { return hello.rank < 8 && hello.rail < 2 ? "" : "nobody connects so"; }

std::string proof(bool of_listening_side, const std::string& hellos) {
  const auto digest = hmac_sha256(secret, (of_listening_side ? "holmes listen" : "holmes connect") + hellos);
  return {digest.begin(), digest.end()};
}

Handshake::Step run(Handshake& handshake, int fd) {
  auto step = Handshake::Step::waiting;
  for (int i = 0; i < 4; ++i) {
    step = handshake.step(fd);
    if (step == Handshake::Step::verified) handshake.confirm(std::nullopt);
  }
  return step;
}

void listen(Input& input, bool knows_secret) {
  auto [own, peer] = socket_pair();
  auto handshake = Handshake::listening(0, secret, check);
  const auto hello = input.text(hello_bytes);
  feed(peer.get(), hello);
  handshake.step(own.get());
  const auto answer = drain(peer.get());
  REQUIRE(answer.empty() || answer.size() == hello_bytes);
  const bool is_answered = answer.size() == hello_bytes;
  feed(peer.get(), knows_secret && is_answered ? proof(false, hello + answer) : input.rest());
  const auto step = run(handshake, own.get());
  if (step == Handshake::Step::done) {
    REQUIRE(knows_secret && check(handshake.peer()).empty() && handshake.peer().version == protocol_version);
    REQUIRE(drain(peer.get()) == proof(true, hello + answer) && handshake.connection_key().size() == 32);
  } else if (step == Handshake::Step::waiting) {
    REQUIRE(!knows_secret || !is_answered);
  }
  if (step == Handshake::Step::failed) REQUIRE(!handshake.failure().empty());
}

void connect(Input& input, bool knows_secret, bool takes_descriptor) {
  auto [own, peer] = socket_pair();
  Hello hello;
  hello.rank = 3;
  auto handshake = Handshake::connecting(hello, 0, secret, takes_descriptor);
  handshake.step(own.get());
  const auto sent = drain(peer.get());
  REQUIRE(sent.size() == hello_bytes);
  const auto answer = input.text(hello_bytes);
  feed(peer.get(), answer);
  handshake.step(own.get());
  feed(peer.get(), knows_secret ? proof(true, sent + answer) : input.rest());
  const auto step = run(handshake, own.get());
  if (step == Handshake::Step::done) REQUIRE(knows_secret && handshake.peer().rank == 0);
  if (step == Handshake::Step::failed) REQUIRE(!handshake.failure().empty());
}

}  // namespace

std::vector<std::string> fuzz::seeds() {
  Hello connecting, listening;
  connecting.rank = 3;
  std::vector<std::string> all;
  for (const char mode : {'\0', '\1'}) all.push_back(mode + connecting.encode() + std::string(32, 'p'));
  for (const char mode : {'\2', '\3', '\6', '\7'}) all.push_back(mode + listening.encode() + std::string(32, 'p'));
  connecting.version = 1;
  all.push_back('\1' + connecting.encode());
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Input input(bytes, size);
  const auto mode = input.byte();
  try {
    if ((mode & 2) == 0) {
      listen(input, (mode & 1) != 0);
    } else {
      connect(input, (mode & 1) != 0, (mode & 4) != 0);
    }
  } catch (const HolmesError&) {
  }
  return 0;
}
