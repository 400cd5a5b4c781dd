// TcpStoreServer: the thread that holds a TcpStore's keys, and what a TcpStore and it say to each other.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "holmes/bootstrap/stored_values.hpp"
#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

// A request: magic (4 bytes), operation (1), length of the key (4), of the value (4), milliseconds to wait (8), key,
// value. A reply: status (1), length of the value (4), value. Numbers are little endian. Several texts in one value are
// a length (4) and the text each: the keys of `get`, `wait`, `check` and `remove`, the values that `get` replies, what
// `compare_set` expects and desires. Of `add`, the amount and the reply have 8 bytes, as the replies of `remove` and
// `count` (how many). `check` replies a byte where all keys are set.
// Where there is a secret, a connection begins with `hello` (key: 16 random bytes of the client; reply: 16 of the
// server) and `prove` (key: the client's proof; reply: the server's); nothing else is served before. The client's proof
// comes first, so that who only connects gets nothing that depends on the secret and could be compared with guesses.
namespace store_protocol {
inline constexpr std::string_view store_magic = "HST2";
inline constexpr std::size_t request_header_bytes = 21;
inline constexpr std::size_t reply_header_bytes = 5;
inline constexpr char op_set = 's', op_get = 'g', op_wait = 'w', op_check = 'c', op_remove = 'd', op_add = 'a',
                      op_compare_set = 'x', op_count = 'n', op_hello = 'h', op_prove = 'p';
// The reply to what timed out is the key, to what cannot be the sentence.
inline constexpr char status_ok = 'o', status_timeout = 't', status_wrong = 'e', status_refused = 'r';
inline constexpr std::size_t max_reply_bytes = TcpStore::max_value_bytes + 4;  // one value of several
inline constexpr std::size_t nonce_bytes = 16;

// What the server, or else the client, says to prove the secret to the other.
std::string proof(const std::string& secret, bool of_server, const std::string& client_nonce,
                  const std::string& server_nonce);

struct Request {
  char operation = 0;
  std::string key, value;
  std::uint64_t wait_ms = 0;
  std::vector<std::string> texts{};  // instead of one value

  std::string encode() const;
};
struct Parsed {
  bool is_wrong = false;           // it cannot become a request
  std::optional<Request> request;  // absent, and not wrong: incomplete
};
// A whole request and nothing behind it: a client has one at a time.
Parsed parse(const std::string& input);

void put_number(std::string& bytes, std::uint64_t value, std::size_t size);
std::uint64_t number_at(const std::string& bytes, std::size_t offset, std::size_t size);
std::string join(std::span<const std::string> texts);
// Absent: it is not what `join` makes.
std::optional<std::vector<std::string>> split(const std::string& joined);
}  // namespace store_protocol

class TcpStoreServer {
public:
  // Throws UsageError where the host has no address here, SystemError where the port is taken. `secret`: what clients
  // must prove to know; empty: whoever comes is served.
  TcpStoreServer(const std::string& host, std::uint16_t port, std::string secret = "");
  ~TcpStoreServer();
  // Ends its thread. False where nothing tells it to, as others have closed its descriptors: it must stay as it is
  // then.
  bool end() noexcept;
  std::uint16_t port() const { return port_; }

private:
  struct Client;
  using Clients = std::list<Client>;
  using Deadlines = std::multimap<Clock::time_point, Client*>;
  struct Client {
    UniqueFd fd;
    std::optional<UninheritedSockets> uninherited{};
    std::string input, output;
    std::optional<std::string> awaited;  // key that the request waits for
    std::uint64_t awaited_since = 0;     // by the number of such requests
    std::vector<std::string> wanted;     // all its keys
    bool wants_values = false;
    bool is_known = false;        // has sent a request that makes sense and, where there is a secret, proved it
    bool waits_for_room = false;  // to send
    std::string expected_proof, own_proof;  // after its hello
    Clients::iterator self;
    std::optional<Deadlines::iterator> deadline;  // of its request, else to finish one, or to take the reply
  };

  void run();
  void poll_once();
  void free_port_and_clients();
  void watch(int fd, void* what);
  void accept_all();
  void receive(Client& client);
  // False where the connection is to be dropped.
  bool handle(Client& client, store_protocol::Request request);
  bool authenticate(Client& client, const store_protocol::Request& request);
  void know(Client& client);
  void drop(Client& client, const std::string& reason = "");
  void drop_largest();
  void reply(Client& client, char status, const std::string& value = "");
  void send(Client& client);
  void set_deadline(Client& client, Clock::time_point deadline);
  void expect(Client& client, const std::string& key);
  void expect_nothing(Client& client);
  // Carries out what never waits; returns the reply's value.
  std::string carry_out(store_protocol::Request& request);
  // Replies to a request for keys where all are there, else lets it wait.
  void look(Client& client);
  void tell_waiting(const std::string& key);

  const std::string secret_;
  const std::size_t max_clients_;
  UniqueFd listener_, wake_, epoll_;
  std::optional<UninheritedSockets> uninherited_;  // the listener
  std::uint16_t port_ = 0;
  StoredValues values_;  // of the thread, as all below
  // Each with the one that came first in front. Strangers are not known yet; `gone_` were dropped in this turn.
  Clients strangers_, clients_, gone_;
  Deadlines deadlines_;
  std::map<std::string, std::map<std::uint64_t, Client*>> waiting_;  // by the key awaited, and since when
  std::uint64_t waits_ = 0;
  std::size_t buffered_bytes_ = 0;  // of unfinished requests
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace holmes
