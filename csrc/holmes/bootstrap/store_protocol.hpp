// StoreProtocol: what a TcpStore and its server say to each other.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace holmes {

// A request: magic (4 bytes), operation (1), length of the key (4), of the value (4), milliseconds to wait (8), key,
// value. A reply: status (1), length of the value (4), value. Numbers are little endian.
// Where there is a secret, a connection begins with `hello` (key: 16 random bytes of the client; reply: 16 of the
// server and its proof) and `prove` (key: the client's proof); nothing else is served before.
namespace store_protocol {
inline constexpr std::string_view magic = "HST1";
inline constexpr std::size_t request_header_bytes = 21;
inline constexpr std::size_t reply_header_bytes = 5;
inline constexpr char op_set = 's', op_get = 'g', op_wait = 'w', op_hello = 'h', op_prove = 'p';
inline constexpr char status_ok = 'o', status_timeout = 't', status_full = 'f', status_refused = 'r';
inline constexpr std::size_t nonce_bytes = 16;

// What the server, or else the client, says to prove the secret to the other.
std::string proof(const std::string& secret, bool of_server, const std::string& client_nonce,
                  const std::string& server_nonce);

struct Request {
  char operation = 0;
  std::string key, value;
  std::uint64_t wait_ms = 0;

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
}  // namespace store_protocol

}  // namespace holmes
