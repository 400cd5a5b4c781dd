// TlsStream, and meshes and communicators over it: nothing readable on the wire, wrong keys and plain peers refused by
// name.
#include "holmes/tls/tls_stream.hpp"

#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <random>

#include "holmes/bootstrap/handshake.hpp"
#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/transport/socket.hpp"
#include "mesh_ranks.hpp"
#include "rail_sockets.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

const std::string secret = "the secret of the job";

struct Ends {
  UniqueFd left_fd, right_fd;
  std::unique_ptr<TlsStream> left, right;
};

// Both steps until neither waits; what the steps came to is in `left` and `right`.
struct Steps {
  TlsStream::Step left = TlsStream::Step::waiting, right = TlsStream::Step::waiting;
};

Steps shake_hands(TlsStream& left, TlsStream& right) {
  Steps steps;
  for (int i = 0; i < 1000; ++i) {
    if (steps.left == TlsStream::Step::waiting) steps.left = left.handshake();
    if (steps.right == TlsStream::Step::waiting) steps.right = right.handshake();
    if (steps.left != TlsStream::Step::waiting && steps.right != TlsStream::Step::waiting) break;
    std::this_thread::sleep_for(1ms);
  }
  return steps;
}

Ends connected(std::uint64_t rekey_bytes = TlsStream::default_rekey_bytes) {
  auto [left_fd, right_fd] = tcp_pair();
  for (const int fd : {left_fd.get(), right_fd.get()}) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  const std::string key(TlsStream::key_bytes, 'k');
  Ends ends;
  ends.left = std::make_unique<TlsStream>(left_fd.get(), true, key, rekey_bytes);
  ends.right = std::make_unique<TlsStream>(right_fd.get(), false, key, rekey_bytes);
  const auto steps = shake_hands(*ends.left, *ends.right);
  if (!(steps.left == TlsStream::Step::done && steps.right == TlsStream::Step::done)) {
    std::fprintf(stderr, "%s; %s\n", ends.left->failure().c_str(), ends.right->failure().c_str());
    std::exit(1);
  }
  ends.left_fd = std::move(left_fd), ends.right_fd = std::move(right_fd);
  return ends;
}

msghdr as_message(iovec* pieces, std::size_t count) {
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
  return message;
}

// Moves `data`, offered and taken in uneven pieces, through sockets that are full most of the time.
void transfer(TlsStream& from, TlsStream& to, const std::string& data) {
  std::string arrived(data.size(), '\0');
  std::size_t sent = 0, received = 0;
  std::mt19937 random(7);
  const auto end = Clock::now() + 20s;
  while (received < data.size() && Clock::now() < end) {
    auto* at = const_cast<char*>(data.data()) + sent;
    const std::size_t left = data.size() - sent, head = std::min<std::size_t>(left, random() % 100);
    iovec out[] = {{at, head}, {at + head, std::min<std::size_t>(left - head, 1 << 20)}};
    const ssize_t taken = left == 0 ? 0 : from.send(as_message(out, 2));
    CHECK(taken >= 0 || errno == EAGAIN);
    if (taken > 0) sent += static_cast<std::size_t>(taken);
    for (int reads = 0; reads < 3 && received < data.size(); ++reads) {
      iovec in[] = {{arrived.data() + received, std::min<std::size_t>(data.size() - received, random() % 300000)}};
      const ssize_t got = in[0].iov_len == 0 ? 0 : to.recv(as_message(in, 1));
      CHECK(got >= 0 || errno == EAGAIN);
      if (got > 0) received += static_cast<std::size_t>(got);
    }
  }
  CHECK(arrived == data);
  char byte;
  iovec none{&byte, 1};
  CHECK(to.recv(as_message(&none, 1)) == -1 && errno == EAGAIN && !to.may_hold_input());
}

void test_transfer() {
  // With a key that is replaced every 100 kB, too.
  for (const std::uint64_t rekey_bytes : {TlsStream::default_rekey_bytes, std::uint64_t{100'000}}) {
    auto ends = connected(rekey_bytes);
    CHECK(contains(ends.left->description(), "TLSv1.3 TLS_"));
    std::string data(5'000'000, '\0');
    std::mt19937 random(3);
    for (char& c : data) c = static_cast<char>(random());
    transfer(*ends.left, *ends.right, data);
    transfer(*ends.right, *ends.left, data);
    for (int i = 0; i < 100; ++i) {  // small ones
      std::string word = "message " + std::to_string(i), got(word.size(), '\0');
      iovec out{word.data(), word.size()}, in{got.data(), got.size()};
      CHECK(ends.left->post(as_message(&out, 1)) == static_cast<ssize_t>(word.size()));
      pollfd entry{ends.right_fd.get(), POLLIN, 0};
      ::poll(&entry, 1, 1000);
      CHECK(ends.right->recv(as_message(&in, 1)) == static_cast<ssize_t>(word.size()) && got == word);
    }
    ends.left_fd.reset();  // a peer that is killed sends no closing alert
    pollfd entry{ends.right_fd.get(), POLLIN, 0};
    ::poll(&entry, 1, 1000);
    iovec in{data.data(), 1};
    CHECK(ends.right->recv(as_message(&in, 1)) == 0 && ends.right->recv(as_message(&in, 1)) == 0);
  }
}

// A bit that changes on the way is an error, never data.
void test_changed_bytes() {
  auto ends = connected();
  std::string word = "a gradient";
  iovec out{word.data(), word.size()};
  CHECK(ends.left->post(as_message(&out, 1)) > 0);
  std::string wire(200, '\0');
  pollfd entry{ends.right_fd.get(), POLLIN, 0};
  CHECK(::poll(&entry, 1, 1000) == 1);
  const ssize_t bytes = ::recv(ends.right_fd.get(), wire.data(), wire.size(), 0);
  CHECK(bytes > std::ssize(word));
  if (bytes <= 0) return;
  wire.resize(static_cast<std::size_t>(bytes));
  CHECK(wire.find("gradient") == std::string::npos);
  wire.back() = static_cast<char>(wire.back() ^ 1);
  CHECK(::send(ends.left_fd.get(), wire.data(), wire.size(), 0) == bytes);
  ::poll(&entry, 1, 1000);
  char byte = 0;
  iovec in{&byte, 1};
  for (int i = 0; i < 2; ++i) CHECK(ends.right->recv(as_message(&in, 1)) == -1 && errno == EPROTO);
  CHECK(byte == 0);
}

void test_wrong_key() {
  auto [left_fd, right_fd] = tcp_pair();
  for (const int fd : {left_fd.get(), right_fd.get()}) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  TlsStream left(left_fd.get(), true, std::string(TlsStream::key_bytes, 'l'));
  TlsStream right(right_fd.get(), false, std::string(TlsStream::key_bytes, 'r'));
  const auto steps = shake_hands(left, right);
  CHECK(steps.left == TlsStream::Step::failed && steps.right == TlsStream::Step::failed);
  CHECK(!left.failure().empty() && !right.failure().empty() && !left.is_broken() && !right.is_broken());
  CHECK(contains(message_of<UsageError>([&] { TlsStream(left_fd.get(), true, "short"); }), "not 5"));
}

void test_mesh() {
  for (const std::size_t rails : {1, 3}) {
    CommunicatorOptions options{.transport = Transport::tcp, .connect_timeout = 20s, .secret = secret};
    options.tls = TlsMode::all;
    for (std::size_t i = 0; i < rails; ++i) options.nics.push_back({"lo", "127.0.0." + std::to_string(i + 1)});
    const auto outcomes = run_ranks(3, options);
    for (const auto& outcome : outcomes) {
      if (!outcome.mesh) std::fprintf(stderr, "%s\n", outcome.message.c_str());
      CHECK(outcome.mesh.has_value());
      if (!outcome.mesh) continue;
      for (const auto& connections : outcome.mesh->peers)
        for (const auto* purpose : {&connections.control, &connections.collective, &connections.p2p})
          for (const auto& socket : *purpose) CHECK(socket.tls && contains(socket.info.encryption, "TLSv1.3"));
    }
  }
  // Only what joins clusters.
  CommunicatorOptions options{.transport = Transport::tcp, .connect_timeout = 20s, .secret = secret};
  options.tls = TlsMode::clusters;
  options.clusters = {0, 0, 1};
  const auto outcomes = run_ranks(3, options);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    CHECK(outcomes[rank].mesh.has_value());
    for (std::size_t peer = 0; outcomes[rank].mesh && peer < 3; ++peer)
      if (peer != rank)
        CHECK((outcomes[rank].mesh->peers[peer].collective[0].tls != nullptr) == ((rank == 2) != (peer == 2)));
  }
}

void test_refusals() {
  CommunicatorOptions options{.transport = Transport::tcp, .connect_timeout = 5s, .secret = secret};
  check_all_fail(run_ranks(3, options,
                           [](auto& own) {
                             own.tls = own.rank == 2 ? TlsMode::off : TlsMode::all;
                             return true;
                           }),
                 ErrorKind::usage, {"rank 2", "'all' and 'off'", "HOLMES_TLS"});
  options.tls = TlsMode::all;
  check_all_fail(run_ranks(2, options,
                           [](auto& own) {
                             own.secret += std::to_string(own.rank);
                             return true;
                           }),
                 ErrorKind::protocol, {"their secrets differ"});
}

// Runs first: one that is loaded stays.
void test_no_openssl() {
  ::setenv("HOLMES_SSL_LIBRARY", "/nowhere/libssl.so.3", 1);
  CommunicatorOptions options{.transport = Transport::tcp, .connect_timeout = 5s, .secret = secret};
  options.tls = TlsMode::all;
  check_all_fail(run_ranks(2, options), ErrorKind::usage, {"no OpenSSL", "/nowhere", "HOLMES_SSL_LIBRARY"});
  ::unsetenv("HOLMES_SSL_LIBRARY");
}

// A rank whose record says TLS, which knows the secret, and then speaks plain text: as one whose TLS somebody strips.
void test_stripped() {
  const auto store = make_local_store();
  const auto listener = listen_on_nic({"lo", "127.0.0.1"}, false, std::nullopt);
  RankInfo record = record_of_other(SocketAddress::local_of(listener.fd.get())->port());
  record.tls = TlsMode::all;
  record.has_secret = true;
  store->set("world/rank/0", encode(record, {secret, "world/rank/0"}));
  std::jthread peer([&](const std::stop_token& stop) {
    const std::string known = group_secret(secret, sha256(pass_on_records(*store, 2)));
    std::vector<UniqueFd> kept;
    while (!stop.stop_requested()) {
      auto fd = accept_one(listener.fd.get());
      if (!fd) {
        std::this_thread::sleep_for(2ms);
        continue;
      }
      auto handshake = Handshake::listening(0, known, [](const Hello&) { return ""; });
      for (int i = 0; i < 1000; ++i) {
        const auto step = handshake.step(fd.get());
        if (step == Handshake::Step::verified) handshake.confirm(std::nullopt);
        if (step == Handshake::Step::done || step == Handshake::Step::failed) break;
        if (step == Handshake::Step::waiting) std::this_thread::sleep_for(1ms);
      }
      const std::string plain(100, 'p');
      ::send(fd.get(), plain.data(), plain.size(), MSG_NOSIGNAL);
      kept.push_back(std::move(fd));
    }
  });
  CommunicatorOptions options{.transport = Transport::tcp, .connect_timeout = 5s, .secret = secret};
  options.tls = TlsMode::all;
  const auto outcomes = run_ranks(2, options, [](auto& own) { return own.rank == 1; }, store);
  check_all_fail(outcomes, ErrorKind::protocol, {"rank 0 (host b1)", "TLS", "HOLMES_TLS"}, 0);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests("test_tls",
                   {{"no_openssl", test_no_openssl},
                    {"transfer", test_transfer},
                    {"changed_bytes", test_changed_bytes},
                    {"wrong_key", test_wrong_key},
                    {"mesh", test_mesh},
                    {"refusals", test_refusals},
                    {"stripped", test_stripped}},
                   argc, argv);
}
