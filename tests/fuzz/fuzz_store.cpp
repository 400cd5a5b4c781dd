// The store's protocol: its parser, its server (with and without a secret) and its client. First byte: which of them.
#include <netinet/in.h>
#include <poll.h>

#include <cerrno>
#include <thread>

#include "fuzz.hpp"
#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/bootstrap/tcp_store_server.hpp"
#include "holmes/transport/socket.hpp"

using namespace holmes;
using namespace holmes::fuzz;

namespace {

using namespace store_protocol;

void parse_one(const std::string& text) {
  const auto parsed = parse(text);
  REQUIRE(!parsed.is_wrong || !parsed.request);
  if (parsed.request) REQUIRE(parsed.request->encode() == text);
}

// libFuzzer's clock interrupts calls that block.
template <typename Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Every connection from an address of its own: ports do not run out.
UniqueFd connect_to(std::uint16_t port) {
  static std::uint32_t number = 0;
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(0x7f010001 + ++number % 0xfe0000);
  REQUIRE(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  // Interrupted, it goes on by itself; a second call then waits for it, or says that it is done.
  const int connected =
      uninterrupted([&] { return ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address); });
  REQUIRE(connected == 0 || errno == EISCONN);
  return fd;
}

void serve(const std::string& text, bool with_secret) {
  static TcpStoreServer open("127.0.0.1", 0), closed("127.0.0.1", 0, "the secret of the job");
  const auto fd = connect_to(with_secret ? closed.port() : open.port());
  ::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL);
  ::shutdown(fd.get(), SHUT_WR);
  std::string got(1 << 16, '\0'), all;
  for (ssize_t bytes = 1; bytes > 0 && all.size() < (1 << 20);) {
    pollfd entry{fd.get(), POLLIN, 0};
    // It answers or ends the connection.
    REQUIRE(uninterrupted([&] { return ::poll(&entry, 1, 10'000); }) == 1);
    bytes = uninterrupted([&] { return ::recv(fd.get(), got.data(), got.size(), 0); });
    if (bytes > 0) all.append(got.data(), static_cast<std::size_t>(bytes));
  }
  // Without the proof nobody reads anything.
  if (with_secret && !all.empty()) REQUIRE(all[0] == status_refused || text[4] == op_hello);
}

// A client whose store answers with `text`, whatever it is asked.
void reply(const std::string& text) {
  const auto listener = listen_on_nic({"lo", "127.0.0.1"}, false, std::nullopt);
  const auto port = SocketAddress::local_of(listener.fd.get())->port();
  std::jthread server([&] {
    pollfd entry{listener.fd.get(), POLLIN, 0};
    ::poll(&entry, 1, 1000);
    const auto fd = accept_one(listener.fd.get());
    if (!fd) return;
    feed(fd.get(), text);
    ::shutdown(fd.get(), SHUT_WR);
    entry.fd = fd.get();
    // Until the client has gone: a reset would hide the answer from it.
    std::string ignored(4096, '\0');
    while (::poll(&entry, 1, 1000) == 1 && ::recv(fd.get(), ignored.data(), ignored.size(), 0) > 0) {
    }
  });
  try {
    TcpStore client("127.0.0.1", port, false, std::chrono::seconds(1));
    const std::vector<std::string> keys{"key", "other"};
    client.multi_get(keys, std::chrono::seconds(0));
    client.add("n", 1);
  } catch (const HolmesError&) {
  }
}

}  // namespace

std::vector<std::string> fuzz::seeds() {
  std::vector<std::string> all;
  const std::vector<Request> requests = {{.operation = op_set, .key = "key", .value = "value"},
                                         {.operation = op_get, .wait_ms = 1, .texts = {"key", "other"}},
                                         {.operation = op_wait, .wait_ms = 1, .texts = {"never"}},
                                         {.operation = op_check, .texts = {"key", "never"}},
                                         {.operation = op_remove, .texts = {"key"}},
                                         {.operation = op_add, .key = "n", .value = std::string(8, '\1')},
                                         {.operation = op_compare_set, .key = "c", .texts = {"", "desired"}},
                                         {.operation = op_count},
                                         {.operation = op_hello, .key = std::string(nonce_bytes, 'n')},
                                         {.operation = op_prove, .key = std::string(32, 'p')}};
  for (const char mode : {'\0', '\1', '\2'})
    for (const auto& request : requests) all.push_back(mode + request.encode());
  std::string answer = "\3o";
  put_number(answer, 5, 4);
  all.push_back(answer + "value");
  all.push_back(answer + "value" + answer.substr(1) + "other");
  all.push_back(std::string("\3t\0\0\0\0", 6));
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Input input(bytes, size);
  const auto mode = input.byte();
  const auto text = input.rest();
  // The parser is a thousand times as fast as the sockets: it sees every input.
  parse_one(text);
  if (mode % 4 == 1 || mode % 4 == 2) serve(text, mode % 4 == 2);
  if (mode % 4 == 3) reply(text);
  return 0;
}
