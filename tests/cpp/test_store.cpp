// The stores, and the environment variables and secrets they go with.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <thread>
#include <vector>

#include "check.hpp"
#include "holmes/bootstrap/secret.hpp"
#include "holmes/bootstrap/stored_values.hpp"
#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/bootstrap/tcp_store_server.hpp"
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

// What agreements need: as torch's stores do it.
void check_atomic(AtomicStore& one, AtomicStore& other) {
  const auto before = one.num_keys();
  CHECK(one.add("n", 5) == 5 && other.add("n", -7) == -2 && one.add("n", 0) == -2 && other.get("n", 0s) == "-2");
  CHECK(one.compare_set("c", "expected", "no") == "expected" && !other.check(std::vector<std::string>{"c"}));
  CHECK(one.compare_set("c", "", "first") == "first" && other.compare_set("c", "", "second") == "first");
  CHECK(other.compare_set("c", "first", "second") == "second" && one.get("c", 0s) == "second");
  one.set("nothing", "");
  CHECK(other.compare_set("nothing", "", std::string("\0", 1)) == std::string("\0", 1));
  const std::vector<std::string> keys{"c", "n", "nothing", "c"}, with_another{"c", "another"};
  CHECK(one.check(keys) && !one.check(with_another) && one.check(std::vector<std::string>{}));
  CHECK((other.multi_get(keys, 0s) == std::vector<std::string>{"second", "-2", std::string("\0", 1), "second"}));
  CHECK(one.multi_get(std::vector<std::string>{}, 0s).empty());
  CHECK(contains(message_of<TimeoutError>([&] { one.multi_get(with_another, 20ms); }), "the store key 'another'"));
  CHECK(one.num_keys() == before + 3);
  CHECK(other.remove(with_another) == 1 && !one.check(keys) && one.num_keys() == before + 2);

  for (const char* value : {"", "many", "1.5", " 1", "1 ", "99999999999999999999"}) {
    one.set("no number", value);
    CHECK(contains(message_of<UsageError>([&] { other.add("no number", 1); }), "'no number' holds '"));
    CHECK(one.get("no number", 0s) == value);
  }
  one.add("most", std::numeric_limits<std::int64_t>::max());
  CHECK(contains(message_of<UsageError>([&] { other.add("most", 1); }), "more than 64 bits"));
  CHECK(one.add("most", std::numeric_limits<std::int64_t>::min()) == -1);
  one.remove(std::vector<std::string>{"n", "nothing", "no number", "most"});

  // Each addition counts once, and each number is seen once; one of those who compare and set wins.
  std::vector<std::int64_t> seen(8 * 50);
  std::atomic<int> winners{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([&, i] {
        AtomicStore& store = i % 2 == 0 ? one : other;
        for (int j = 0; j < 50; ++j) seen[static_cast<std::size_t>(50 * i + j)] = store.add("sum", 1);
        const auto own = std::to_string(i);
        winners += store.compare_set("won", "", own) == own;
      });
  }
  std::ranges::sort(seen);
  for (std::size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == static_cast<std::int64_t>(i + 1));
  CHECK(winners == 1);

  // Who waits for several sees those that come by addition and by comparing, whatever came first.
  for (const bool is_first : {false, true}) {
    const std::string a = is_first ? "x" : "y", b = is_first ? "y" : "x";
    std::jthread waits([&] {
      const std::vector<std::string> both{"x", "y"};
      CHECK((other.multi_get(both, 20s) == std::vector<std::string>{is_first ? "1" : "7", is_first ? "7" : "1"}));
    });
    std::this_thread::sleep_for(20ms);
    one.add(a, 1);
    std::this_thread::sleep_for(20ms);
    one.compare_set(b, "", "7");
    waits.join();
    one.remove(std::vector<std::string>{"x", "y"});
  }
  one.remove(std::vector<std::string>{"sum", "won"});
  CHECK(one.num_keys() == before);
}

void test_stored_values() {
  StoredValues values(20);
  values.set("key", "0123456789");
  CHECK(contains(message_of<UsageError>([&] { values.set("other", "value"); }), "full: key 'other'"));
  CHECK(contains(message_of<UsageError>([&] { values.compare_set("other", "", "value"); }), "full"));
  values.set("key", "01234567890123456");
  CHECK(contains(message_of<UsageError>([&] { values.add("n", 1); }), "full"));
  CHECK(values.size() == 1 && values.remove(std::vector<std::string>{"key", "key"}) == 1);
  CHECK(values.add("n", 1) == 1);
}

void test_local_and_prefix() {
  const auto base = make_local_store();
  check_store(*base, *base);
  check_atomic(*base, *base);
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
  check_atomic(server, client);
  check_atomic(client, client);
  const std::string large(TcpStore::max_value_bytes, 'x');
  client.set("large", large);
  CHECK(server.get("large", 10s) == large);
  CHECK(contains(message_of<UsageError>([&] { client.set("larger", large + "x"); }), "16777217"));
  const std::vector<std::string> twice{"large", "large"}, long_key{"large", std::string(5000, 'k')};
  CHECK(contains(message_of<UsageError>([&] { client.multi_get(twice, 0s); }), "ask for fewer keys at once"));
  CHECK(contains(message_of<UsageError>([&] { client.check(long_key); }), "5000"));
  CHECK(contains(message_of<UsageError>([&] { client.compare_set("large", large, "x"); }), "the rest 1677722"));
  CHECK(client.multi_get(std::span(twice).first(1), 0s).front() == large);
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

// One that is stopped: connections are made, and nothing is answered.
void test_a_store_that_does_not_answer() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto any = SocketAddress::parse("127.0.0.1", 0);
  CHECK(::bind(listener.get(), any.data(), any.length()) == 0 && ::listen(listener.get(), 8) == 0);
  const auto port = SocketAddress::local_of(listener.get())->port();
  const auto started = Clock::now();
  const auto said = message_of<UnreachableError>([&] { TcpStore("127.0.0.1", port, false, 100ms, "", 300ms); });
  CHECK(contains(said, "is lost") && contains(said, std::to_string(port)));
  CHECK(Clock::now() - started >= 300ms && Clock::now() - started < 10s);
}

// Of those that wait some leave; some do not take what they asked for.
void test_clients_that_leave_and_clients_that_read_late() {
  namespace protocol = store_protocol;
  TcpStore server("127.0.0.1", 0, true);
  const auto address = SocketAddress::parse("127.0.0.1", server.port());
  const auto asks = [&](const protocol::Request& request) {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(::connect(fd.get(), address.data(), address.length()) == 0);
    const timeval limit{20, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    const auto bytes = request.encode();
    CHECK(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    return fd;
  };
  const auto reads = [](const UniqueFd& fd, std::size_t bytes) {
    std::string got(bytes, '\0');
    CHECK(::recv(fd.get(), got.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
    return got;
  };
  std::vector<UniqueFd> waiting;
  for (int i = 0; i < 60; ++i)
    waiting.push_back(asks({.operation = protocol::op_get,
                            .key = "",
                            .value = "",
                            .wait_ms = 20'000,
                            .texts = {"late", i % 2 == 0 ? "later" : "late"}}));
  for (std::size_t i = 0; i < waiting.size(); i += 3) waiting[i].reset();
  server.set("late", "1");
  for (std::size_t i = 1; i < waiting.size(); i += 6)
    CHECK(reads(waiting[i], 15).substr(5) == protocol::join(std::vector<std::string>{"1", "1"}));
  server.add("later", 22);
  for (std::size_t i = 2; i < waiting.size(); i += 6) CHECK(contains(reads(waiting[i], 16), "22"));

  server.set("large", std::string(TcpStore::max_value_bytes, 'x'));
  std::vector<UniqueFd> slow;
  for (int i = 0; i < 4; ++i)
    slow.push_back(asks({.operation = protocol::op_get, .key = "", .value = "", .texts = {"large"}}));
  check_atomic(server, server);  // nobody waits for those who do not read
  slow[1].reset();
  for (const std::size_t i : {std::size_t{3}, std::size_t{0}, std::size_t{2}})
    CHECK(reads(slow[i], 5 + 4 + TcpStore::max_value_bytes).back() == 'x');
  check_store(server, server);
}

// What a stranger sends is dropped, the store goes on.
void test_tcp_strangers() {
  TcpStore server("127.0.0.1", 0, true);
  const auto address = SocketAddress::parse("127.0.0.1", server.port());
  const auto header = [](char operation, std::uint64_t key, std::uint64_t value, std::uint64_t wait) {
    std::string bytes = "HST2";
    bytes += operation;
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(key >> (8 * i));
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(value >> (8 * i));
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(wait >> (8 * i));
    return bytes;
  };
  const std::vector<std::string> garbage = {"GET / HTTP/1.1\r\n\r\n",
                                            std::string(1 << 16, '\0'),
                                            header('s', 0xffffffff, 1, 0),
                                            header('s', 1, 0xffffffff, 0),
                                            header('n', 1, 5, 0),
                                            header('g', 1, 0, ~std::uint64_t{0}),
                                            header('?', 1, 0, 0) + "k",
                                            header('g', 1, 0, 0) + "k and more",
                                            header('a', 1, 4, 0) + "k1234",
                                            header('x', 1, 4, 0) + std::string("k\0\0\0\0", 5),
                                            header('d', 0, 5, 0) + std::string("\2\0\0\0k", 5),
                                            header('c', 0, 3, 0) + "\1\1\1"};
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

// The process that goes on in `child`, its end awaited by `check_ended`. Not ::fork: `runs_no_handler` as where another
// library starts a process, whose child has a copy of every descriptor until it executes another program.
pid_t start_worker(bool runs_no_handler, int (*child)(std::uint16_t port), std::uint16_t port) {
  const auto worker = runs_no_handler
                          ? static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr))
                          : ::fork();
  if (worker == 0) ::_exit(child(port));
  CHECK(worker > 0);
  return worker;
}

void check_ended(pid_t worker, int exit_code) {
  int status = 0;
  CHECK(::waitpid(worker, &status, 0) == worker && WIFEXITED(status) && WEXITSTATUS(status) == exit_code);
}

// How many of the store's sockets this process holds.
int count_sockets(std::uint16_t port) {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    const auto local = SocketAddress::local_of(fd);
    count += local && local->port() == port;
  }
  return count;
}

// Processes that were forked while they were open, as a data loader's workers, live longer than the connections and the
// store: who is dropped sees it, what such a connection brings later is nobody's, and the port is free for the next
// store.
void test_forked_processes() {
  auto server = std::make_unique<TcpStore>("127.0.0.1", 0, true);
  const auto port = server->port();
  const auto address = SocketAddress::parse("127.0.0.1", port);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 8; ++i) {
    auto& fd = strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(::connect(fd.get(), address.data(), address.length()) == 0);
    const timeval limit{5, 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  check_store(*server, *server);  // it has accepted them
  CHECK(count_sockets(port) > 1 + 8);
  check_ended(start_worker(/*runs_no_handler=*/false, count_sockets, port), 0);
  const auto waits = [](std::uint16_t) {
    ::pause();
    return 0;
  };
  const pid_t worker = start_worker(/*runs_no_handler=*/true, waits, port);
  for (auto& fd : strangers) {
    CHECK(::send(fd.get(), "no request of a store", 21, MSG_NOSIGNAL) == 21);
    char byte = 0;
    const auto got = ::recv(fd.get(), &byte, 1, 0);
    CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
  }
  for (auto& fd : strangers) ::shutdown(fd.get(), SHUT_RDWR);
  strangers.clear();
  check_store(*server, *server);
  server.reset();
  TcpStore next("127.0.0.1", port, true, 5s);
  check_store(next, next);
  CHECK(::kill(worker, SIGKILL) == 0 && ::waitpid(worker, nullptr, 0) == worker);
  check_store(next, next);
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
  test_stored_values();
  test_local_and_prefix();
  test_tcp();
  test_a_store_that_does_not_answer();
  test_clients_that_leave_and_clients_that_read_late();
  test_tcp_errors();
  test_tcp_strangers();
  test_forked_processes();
  test_env();
  test_given_secret();
  test_a_weak_secret();
  return result("test_store");
}
