// connect_mesh among strangers: garbage, floods, other versions.
#include <unistd.h>

#include <cstring>

#include "holmes/bootstrap/handshake.hpp"
#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/transport/socket.hpp"
#include "mesh_ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr std::uint16_t other = protocol_version + 1;
const std::string other_version = "version " + std::to_string(other);
const std::string own_version = "version " + std::to_string(protocol_version);

// As a record begins.
std::string in_version(std::uint16_t version) {
  const std::string number = std::to_string(version);
  return "6:holmes" + std::to_string(number.size()) + ":" + number;
}

void test_other_version() {
  auto store = make_local_store();
  store->set("world/rank/1", in_version(other) + "4:rank");
  const auto outcomes = run_ranks(2, {}, [](auto& options) { return options.rank == 0; }, store);
  check_all_fail(outcomes, ErrorKind::protocol, {"rank 1", other_version, own_version}, 1);
  store = make_local_store();
  store->set("world/rank/1", in_version(protocol_version) + "99999999999:rank");
  const auto garbage = run_ranks(2, {}, [](auto& options) { return options.rank == 0; }, store);
  check_all_fail(garbage, ErrorKind::protocol, {"rank 1", "makes no sense"}, 1);
}

// A peer whose library changed under a record that looks right.
void test_other_version_on_the_wire() {
  const auto store = make_local_store();
  const auto listener = listen_on_nic({"lo", "127.0.0.1"}, false, std::nullopt);
  RankInfo record = record_of_other(SocketAddress::local_of(listener.fd.get())->port());
  record.made_secret = "secret";
  store->set("world/rank/0", encode(record, {"", "world/rank/0"}));
  std::jthread peer([&](const std::stop_token& stop) {
    pass_on_records(*store, 2);
    while (!stop.stop_requested()) {
      const auto fd = accept_one(listener.fd.get());
      Hello hello;
      hello.version = other;
      const auto bytes = hello.encode();
      if (fd) CHECK(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0);
      std::this_thread::sleep_for(5ms);
    }
  });
  const auto outcomes = run_ranks(
      2, {.transport = Transport::tcp, .connect_timeout = 3s}, [](auto& options) { return options.rank == 1; }, store);
  check_all_fail(outcomes, ErrorKind::protocol, {"rank 0 (host b1)", other_version, own_version}, 0);
}

int connect_stranger(std::uint16_t port) {
  const auto address = SocketAddress::parse("127.0.0.1", port);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(::connect(fd, address.data(), address.length()) == 0);
  return fd;
}

bool is_dropped(int fd, std::chrono::seconds timeout) {
  const timeval limit{timeout.count(), 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  char bytes[256];
  ssize_t got = 0;
  do {
    got = ::recv(fd, bytes, sizeof(bytes), 0);
  } while (got > 0);
  return got == 0 || errno == ECONNRESET;
}

// Lets nobody read before `go`.
class LateStore final : public Store {
public:
  explicit LateStore(std::shared_ptr<Store> base) : base_(std::move(base)) {}
  void set(const std::string& key, const std::string& value) override { base_->set(key, value); }
  std::string get(const std::string& key, Duration timeout) override {
    base_->wait("go", 30s);
    return base_->get(key, timeout);
  }
  void wait(const std::string& key, Duration timeout) override { base_->wait(key, timeout); }

private:
  std::shared_ptr<Store> base_;
};

// Strangers come while rank 0 waits for a late rank 2; the mesh stands all the same, and its ports are closed then.
void test_strangers() {
  const auto store = make_local_store();
  LateStore late(store);
  std::uint16_t port = 0;
  std::jthread strangers([&] {
    const auto record = decode_rank(store->get("world/rank/0", 10s), "rank 0", {"", "world/rank/0"});
    port = record.rails.at(0).port;
    Hello hello;
    hello.rank = 1;
    hello.group = group_hash("world");
    std::vector<int> fds;
    const auto say = [&](const std::string& text) {
      fds.push_back(connect_stranger(port));
      CHECK(::send(fds.back(), text.data(), text.size(), MSG_NOSIGNAL) >= 0);
    };
    say("GET / HTTP/1.1\r\n\r\n");
    say(std::string(1 << 16, '\xff'));
    say(std::string("HOLMES\r\n") + std::string(100, '\x7f'));
    auto changed = hello;
    changed.version = protocol_version + 1;
    say(changed.encode());
    changed = hello, changed.rank = 77;
    say(changed.encode());
    changed = hello, changed.rank = 0;
    say(changed.encode());
    changed = hello, changed.rail = 9;
    say(changed.encode());
    changed = hello, changed.purpose = static_cast<Purpose>(200);
    say(changed.encode());
    changed = hello, changed.streams = 2;  // of control connections there is one
    say(changed.encode());
    changed = hello, changed.purpose = Purpose::p2p, changed.streams = 2, changed.stream = 3;
    say(changed.encode());
    changed.streams = 200;
    say(changed.encode());
    changed.streams = changed.stream = 0;
    say(changed.encode());
    changed = hello, changed.group = group_hash("other");
    say(changed.encode());
    say(hello.encode() + std::string(32, 'x'));  // a wrong proof
    const auto last = fds.size();
    for (int i = 0; i < 300; ++i) fds.push_back(connect_stranger(port));  // more than are kept; silent
    for (std::size_t i = 0; i < last; ++i) {
      if (i != 3) CHECK(is_dropped(fds[i], 10s));
    }
    std::string answer(hello_bytes, '\0');  // to the other version
    CHECK(::recv(fds[3], answer.data(), answer.size(), MSG_WAITALL) == static_cast<ssize_t>(hello_bytes));
    CHECK(Hello::decode(answer)->version == protocol_version);
    CHECK(is_dropped(fds[last], 10s));
    std::this_thread::sleep_for(100ms);
    store->set("go", "");
    std::this_thread::sleep_for(500ms);
    for (const int fd : fds) ::close(fd);
  });
  auto outcomes = run_ranks(3, {.transport = Transport::tcp}, nullptr, store,
                            [&](int rank) -> Store& { return rank == 2 ? static_cast<Store&>(late) : *store; });
  strangers.join();
  check_pairs(outcomes, false, 1);
  const auto address = SocketAddress::parse("127.0.0.1", port);
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(::connect(fd.get(), address.data(), address.length()) != 0 && errno == ECONNREFUSED);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests("test_mesh_strangers",
                   {{"other_version", test_other_version},
                    {"other_version_on_the_wire", test_other_version_on_the_wire},
                    {"strangers", test_strangers}},
                   argc, argv);
}
