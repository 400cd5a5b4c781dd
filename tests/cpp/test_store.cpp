// The stores, and the environment variables and secrets they go with.
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "check.hpp"
#include "holmes/bootstrap/secret.hpp"
#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/core/env.hpp"
#include "holmes/transport/socket.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

// What every store does, seen through `writer` and `reader` (which may be the same).
void check_store(Store& writer, Store& reader) {
  writer.set("a", "1");
  CHECK(reader.get("a", 1s) == "1");
  writer.set("a", "22");
  CHECK(reader.get("a", 1s) == "22");
  reader.wait("a", 0s);
  const std::string binary("\0\xff\n", 3);
  writer.set("binary", binary);
  CHECK(reader.get("binary", 1s) == binary);
  writer.set("empty", "");
  CHECK(reader.get("empty", 1s).empty());

  const auto started = Clock::now();
  CHECK(contains(message_of<TimeoutError>([&] { reader.get("never", 50ms); }), "never'"));
  CHECK(contains(message_of<TimeoutError>([&] { reader.wait("never", 50ms); }), "never'"));
  CHECK(Clock::now() - started >= 100ms && Clock::now() - started < 3s);

  const std::vector<std::string> gone{"gone", "never"};
  writer.set("gone", "1");
  writer.remove(gone);
  CHECK(contains(message_of<TimeoutError>([&] { reader.wait("gone", 10ms); }), "gone'"));
  writer.set("gone", "2");
  CHECK(reader.get("gone", 1s) == "2");

  // Waiting for what others set later, several at once; nobody holds up the others.
  std::vector<std::jthread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] { CHECK(reader.get("late" + std::to_string(i), 10s) == std::to_string(i)); });
  }
  for (int i = 7; i >= 0; --i) writer.set("late" + std::to_string(i), std::to_string(i));
}

void test_local_and_prefix() {
  const auto base = make_local_store();
  check_store(*base, *base);
  PrefixStore one("one", base), again("one", base), other("other", base);
  check_store(one, again);
  CHECK(base->get("one/a", 0s) == "22");
  message_of<TimeoutError>([&] { other.get("a", 10ms); });
  CHECK(contains(message_of<UsageError>([] { PrefixStore("x", nullptr); }), "needs a store"));
}

void test_tcp() {
  TcpStore server("127.0.0.1", 0, true);
  CHECK(server.port() != 0);
  TcpStore client("localhost", server.port(), false, 5s);
  check_store(server, client);
  check_store(client, server);
  check_store(client, client);
  const std::string large(TcpStore::max_value_bytes, 'x');
  client.set("large", large);
  CHECK(server.get("large", 10s) == large);
  CHECK(contains(message_of<UsageError>([&] { client.set("larger", large + "x"); }), "16777217"));
  CHECK(contains(message_of<UsageError>([&] { client.set(std::string(5000, 'k'), ""); }), "5000"));
}

void test_tcp_errors() {
  const auto started = Clock::now();
  CHECK(contains(message_of<UnreachableError>([] { TcpStore("127.0.0.1", 1, false, 200ms); }), "127.0.0.1:1"));
  CHECK(contains(message_of<SystemError>([] { TcpStore("192.0.2.1", 0, true, 1s); }), "192.0.2.1"));
  {
    TcpStore first("127.0.0.1", 0, true);
    CHECK(contains(message_of<SystemError>([&] { TcpStore("127.0.0.1", first.port(), true, 1s); }), "in use"));
  }
  auto server = std::make_unique<TcpStore>("127.0.0.1", 0, true);
  TcpStore client("127.0.0.1", server->port(), false, 1s);
  std::jthread stop([&] {
    std::this_thread::sleep_for(100ms);
    server.reset();
  });
  CHECK(contains(message_of<UnreachableError>([&] { client.get("never", 30s); }), "lost"));
  CHECK(Clock::now() - started < 10s);
}

// What a stranger sends is dropped, the store goes on.
void test_tcp_strangers() {
  TcpStore server("127.0.0.1", 0, true);
  const auto address = SocketAddress::parse("127.0.0.1", server.port());
  const auto header = [](char operation, std::uint64_t key, std::uint64_t value, std::uint64_t wait) {
    std::string bytes = "HST1";
    bytes += operation;
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(key >> (8 * i));
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> (8 * i));
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(wait >> (8 * i));
    return bytes;
  };
  const std::vector<std::string> garbage = {"GET / HTTP/1.1\r\n\r\n",      std::string(1 << 16, '\0'),
                                            header('s', 0xffffffff, 1, 0), header('s', 1, 0xffffffff, 0),
                                            header('g', 1, 5, 0),          header('g', 1, 0, ~std::uint64_t{0}),
                                            header('?', 1, 0, 0) + "k",    header('g', 1, 0, 0) + "k and more"};
  for (const auto& bytes : garbage) {
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(::connect(fd.get(), address.data(), address.length()) == 0);
    const timeval limit{5, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    CHECK(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
    char byte = 0;
    const auto got = ::recv(fd.get(), &byte, 1, 0);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
  }
  const UniqueFd silent(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(::connect(silent.get(), address.data(), address.length()) == 0);
  check_store(server, server);
}

void test_env() {
  const auto refuse = [](const char* variable, const char* value) {
    ::setenv(variable, value, 1);
    const auto message = message_of<UsageError>([] { Env::read(); });
    ::unsetenv(variable);
    CHECK(contains(message, std::string(variable) + "='" + value + "'") && contains(message, "unset it"));
  };
  for (const char* value : {"40000", "0-5", "5-4", "1-65536", "a-b", "1-2-3"}) refuse("HOLMES_PORT_RANGE", value);
  for (const char* value : {"0", "-1", "soon", "nan", "inf", "5s"}) refuse("HOLMES_CONNECT_TIMEOUT_S", value);
  for (const char* value : {"-1", "1.5", "1000001"}) refuse("HOLMES_SPIN_US", value);
  for (const char* value : {"0", "65", "two"}) refuse("HOLMES_IO_THREADS", value);
  for (const char* value : {"3-1", "node0", "0,,1"}) refuse("HOLMES_IO_CPUS", value);
  refuse("HOLMES_SHM", "yes");
  refuse("HOLMES_CMA", "1");
  refuse("HOLMES_LOG", "loud");

  ::setenv("HOLMES_PORT_RANGE", "40000-40100", 1);
  ::setenv("HOLMES_CONNECT_TIMEOUT_S", "2.5", 1);
  ::setenv("HOLMES_SPIN_US", "0", 1);
  ::setenv("HOLMES_SHM", "0", 1);
  ::setenv("HOLMES_CMA", "0", 1);
  ::setenv("HOLMES_HOSTNAME", "b1", 1);
  const auto env = Env::read();
  CHECK(env.port_range->first == 40000 && env.port_range->second == 40100);
  CHECK(env.connect_timeout == 2500ms && env.spin == 0us && !env.shm && env.cma == CmaUse::never);
  CHECK(host_name() == "b1");
  for (const auto& variable : env_variables()) {
    CHECK(!variable.values.empty() && !variable.default_value.empty() && !variable.meaning.empty());
    ::unsetenv(variable.name.c_str());
  }
  CHECK(!Env::read().port_range && Env::read().shm && Env::read().cma == CmaUse::measured && host_name() != "b1");
}

void test_given_secret() {
  Env env;
  CHECK(!given_secret("", env));
  char path[] = "/tmp/holmes-test-secret-XXXXXX";
  const UniqueFd fd(::mkstemp(path));
  env.secret_file = path;
  CHECK(contains(message_of<UsageError>([&] { given_secret("", env); }), path));
  std::ofstream(path) << "a secret from a file\n";
  CHECK(given_secret("", env) == "a secret from a file");
  ::unlink(path);
  CHECK(contains(message_of<UsageError>([&] { given_secret("", env); }), path));
  // Nothing that is read for ever.
  CHECK(::mkfifo(path, 0600) == 0);
  CHECK(contains(message_of<UsageError>([&] { given_secret("", env); }), "regular file of 1 to 65536 bytes"));
  ::unlink(path);
  for (const char* other : {"/dev/zero", "/proc/self", "/proc/self/exe"}) {
    env.secret_file = other;
    CHECK(contains(message_of<UsageError>([&] { given_secret("", env); }), other));
  }
  env.secret = "a secret from a variable";
  CHECK(given_secret("", env) == "a secret from a variable");
  CHECK(given_secret("a secret from an option", env) == "a secret from an option");
}

// Nowhere is one taken that can be found by trying, and none is shown.
void test_a_weak_secret() {
  CHECK(given_secret("0123456789abcdef", {}) == "0123456789abcdef");  // 16 bytes do
  const auto refused = [](const std::string& option, const Env& env) {
    const auto text = message_of<UsageError>([&] { given_secret(option, env); });
    CHECK(contains(text, "at least 16, 5 of them different") && contains(text, "'openssl rand -hex 32'"));
    CHECK(text.find("swordfish") == std::string::npos);
    return text;
  };
  CHECK(contains(refused("swordfish", {}), "the option 'secret' has 9 bytes"));
  refused(std::string(64, 'a'), {});
  refused("abcdabcdabcdabcdabcd", {});
  Env env;
  env.secret = "swordfish";
  CHECK(contains(refused("", env), "HOLMES_SECRET has 9 bytes"));
  env.secret.reset();
  char path[] = "/tmp/holmes-test-secret-XXXXXX";
  const UniqueFd fd(::mkstemp(path));
  std::ofstream(path) << "swordfish\n";
  env.secret_file = path;
  CHECK(contains(refused("", env), "HOLMES_SECRET_FILE='" + std::string(path) + "' has 9 bytes"));
  ::unlink(path);
}

}  // namespace

int main() {
  test_local_and_prefix();
  test_tcp();
  test_tcp_errors();
  test_tcp_strangers();
  test_env();
  test_given_secret();
  test_a_weak_secret();
  return result("test_store");
}
