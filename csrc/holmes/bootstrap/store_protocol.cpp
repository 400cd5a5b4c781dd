#include "holmes/bootstrap/store_protocol.hpp"

#include <algorithm>

#include "holmes/bootstrap/sha256.hpp"
#include "holmes/bootstrap/tcp_store.hpp"

namespace holmes::store_protocol {
namespace {

constexpr std::uint64_t max_wait_ms = std::uint64_t{365} * 24 * 3600 * 1000;

}  // namespace

void put_number(std::string& bytes, std::uint64_t value, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) bytes += static_cast<char>(value >> (8 * i));
}

std::uint64_t number_at(const std::string& bytes, std::size_t offset, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i) {
    value |= std::uint64_t{static_cast<std::uint8_t>(bytes[offset + i])} << (8 * i);
  }
  return value;
}

std::string proof(const std::string& secret, bool of_server, const std::string& client_nonce,
                  const std::string& server_nonce) {
  const std::string role = of_server ? "holmes store server" : "holmes store client";
  const auto digest = hmac_sha256(secret, role + client_nonce + server_nonce);
  return {digest.begin(), digest.end()};
}

std::string Request::encode() const {
  std::string bytes(magic);
  bytes += operation;
  put_number(bytes, key.size(), 4);
  put_number(bytes, value.size(), 4);
  put_number(bytes, wait_ms, 8);
  return bytes + key + value;
}

Parsed parse(const std::string& input) {
  const Parsed wrong{.is_wrong = true, .request = {}};
  const auto prefix = std::min(input.size(), magic.size());
  if (input.compare(0, prefix, magic.substr(0, prefix)) != 0) return wrong;
  if (input.size() < request_header_bytes) return {};
  Request request{.operation = input[4], .key = {}, .value = {}, .wait_ms = number_at(input, 13, 8)};
  const auto key_bytes = number_at(input, 5, 4), value_bytes = number_at(input, 9, 4);
  const bool is_known = std::string_view("sgwhp").find(request.operation) != std::string_view::npos;
  if (!is_known || (request.operation != op_set && value_bytes != 0)) return wrong;
  const bool is_handshake = request.operation == op_hello || request.operation == op_prove;
  if (is_handshake && key_bytes != (request.operation == op_hello ? nonce_bytes : std::tuple_size_v<Digest>))
    return wrong;
  if (key_bytes > TcpStore::max_key_bytes || value_bytes > TcpStore::max_value_bytes || request.wait_ms > max_wait_ms)
    return wrong;
  const auto request_bytes = request_header_bytes + key_bytes + value_bytes;
  if (input.size() > request_bytes) return wrong;
  if (input.size() < request_bytes) return {};
  request.key = input.substr(request_header_bytes, key_bytes);
  request.value = input.substr(request_header_bytes + key_bytes);
  return {.is_wrong = false, .request = std::move(request)};
}

}  // namespace holmes::store_protocol
