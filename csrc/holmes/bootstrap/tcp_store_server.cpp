#include "holmes/bootstrap/tcp_store_server.hpp"

#include <netdb.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <memory>

#include "holmes/bootstrap/secret.hpp"
#include "holmes/bootstrap/sha256.hpp"
#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/thread.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {

namespace store_protocol {
namespace {

constexpr std::uint64_t max_wait_ms = std::uint64_t{365} * 24 * 3600 * 1000;
constexpr std::string_view operations = "sgwcdaxnhp", with_value = "sgwcdax", with_texts = "gwcdx";

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

std::string join(std::span<const std::string> texts) {
  std::string joined;
  for (const std::string& text : texts) {
    put_number(joined, text.size(), 4);
    joined += text;
  }
  return joined;
}

std::optional<std::vector<std::string>> split(const std::string& joined) {
  std::vector<std::string> texts;
  for (std::size_t at = 0; at < joined.size();) {
    if (joined.size() - at < 4) return std::nullopt;
    const auto bytes = number_at(joined, at, 4);
    at += 4;
    if (joined.size() - at < bytes) return std::nullopt;
    texts.push_back(joined.substr(at, bytes));
    at += bytes;
  }
  return texts;
}

std::string proof(const std::string& secret, bool of_server, const std::string& client_nonce,
                  const std::string& server_nonce) {
  const std::string role = of_server ? "holmes store server" : "holmes store client";
  const auto digest = hmac_sha256(secret, role + client_nonce + server_nonce);
  return {digest.begin(), digest.end()};
}

std::string Request::encode() const {
  std::string bytes(store_magic);
  const std::string whole = texts.empty() ? value : join(texts);
  bytes += operation;
  put_number(bytes, key.size(), 4);
  put_number(bytes, whole.size(), 4);
  put_number(bytes, wait_ms, 8);
  return bytes + key + whole;
}

Parsed parse(const std::string& input) {
  const Parsed wrong{.is_wrong = true, .request = {}};
  const auto prefix = std::min(input.size(), store_magic.size());
  if (input.compare(0, prefix, store_magic.substr(0, prefix)) != 0) return wrong;
  if (input.size() < request_header_bytes) return {};
  Request request{.operation = input[4], .key = {}, .value = {}, .wait_ms = number_at(input, 13, 8)};
  const auto key_bytes = number_at(input, 5, 4), value_bytes = number_at(input, 9, 4);
  const auto is_one_of = [&](std::string_view some) { return some.find(request.operation) != std::string_view::npos; };
  const bool is_handshake = request.operation == op_hello || request.operation == op_prove;
  if (!is_one_of(operations) || (value_bytes != 0 && !is_one_of(with_value)) ||
      (request.operation == op_add && value_bytes != 8))
    return wrong;
  if (is_handshake && key_bytes != (request.operation == op_hello ? nonce_bytes : std::tuple_size_v<Digest>))
    return wrong;
  if (key_bytes > TcpStore::max_key_bytes || value_bytes > TcpStore::max_value_bytes || request.wait_ms > max_wait_ms)
    return wrong;
  const auto request_bytes = request_header_bytes + key_bytes + value_bytes;
  if (input.size() > request_bytes) return wrong;
  if (input.size() < request_bytes) return {};
  request.key = input.substr(request_header_bytes, key_bytes);
  request.value = input.substr(request_header_bytes + key_bytes);
  if (is_one_of(with_texts)) {
    auto texts = split(request.value);
    if (!texts || (request.operation == op_compare_set && texts->size() != 2)) return wrong;
    request.texts = std::move(*texts);
    request.value.clear();
  }
  return {.is_wrong = false, .request = std::move(request)};
}

}  // namespace store_protocol

namespace {

using namespace std::chrono_literals;
using namespace store_protocol;

constexpr std::size_t max_silent_clients = 256;  // connections that have not sent a request yet
constexpr int max_new_clients = 64;              // per turn of the loop
constexpr std::size_t max_stored_bytes = std::size_t{1} << 30;
constexpr std::size_t max_buffered_bytes = std::size_t{256} << 20;
constexpr Duration request_timeout = 10s;  // from connect, or a request's first byte, to its last
constexpr Duration reply_timeout = 60s;    // to take a reply

// The store must not use up the descriptors of its process, which works besides.
std::size_t client_limit() {
  raise_open_files_limit();
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = most_open_files;
  return std::clamp<std::size_t>(limit.rlim_cur, 2, most_open_files) / 2;
}

UniqueFd listen_on(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw UsageError("the store's host '" + host + "' cannot be resolved: " + ::gai_strerror(error) +
                     "; give a name or address of this machine");
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  UniqueFd fd(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (!fd || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(fd.get(), SOMAXCONN) != 0) {
    throw SystemError(
        "the store cannot listen on " + host + ":" + std::to_string(port) + ": " + errno_text(errno) +
            (errno == EADDRINUSE ? "; another process serves there: give rank 0 (RANK) to one process only, "
                                   "and each job a port of its own (MASTER_PORT)"
                                 : "; choose an address of this machine and a free port (0: any)"),
        {.system_errno = errno});
  }
  return fd;
}

}  // namespace

TcpStoreServer::TcpStoreServer(const std::string& host, std::uint16_t port, std::string secret)
    : secret_(std::move(secret)),
      max_clients_(client_limit()),
      listener_(listen_on(host, port)),
      wake_(event_fd()),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      values_(max_stored_bytes) {
  if (!epoll_)
    throw SystemError("the store cannot make an epoll descriptor: " + errno_text(errno), {.system_errno = errno});
  uninherited_.emplace(std::vector<int>{listener_.get()});
  watch(listener_.get(), &listener_);
  watch(wake_.get(), &wake_);
  port_ = SocketAddress::local_of(listener_.get()).value().port();
  thread_ = start_thread("serves the store", [this] { run(); });
}

TcpStoreServer::~TcpStoreServer() {
  if (thread_.joinable() && !end()) thread_.join();
}

bool TcpStoreServer::end() noexcept {
  const std::uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof(one)) != sizeof(one)) return false;
  thread_.join();
  return true;
}

void TcpStoreServer::run() {
  while (!stop_) {
    try {
      poll_once();
    } catch (const std::exception& error) {  // of one request; the store goes on
      log(LogLevel::error, std::nullopt, std::string("store: ") + error.what());
      std::this_thread::sleep_for(100ms);
    }
  }
}

// Closing does neither where another process holds copies, as a child does until it executes its program.
void TcpStoreServer::free_port_and_clients() {
  ::shutdown(listener_.get(), SHUT_RDWR);
  for (const Clients* clients : {&strangers_, &clients_})
    for (const Client& client : *clients) ::shutdown(client.fd.get(), SHUT_RDWR);
}

void TcpStoreServer::watch(int fd, void* what) {
  epoll_event event{.events = EPOLLIN, .data = {.ptr = what}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    throw SystemError("the store cannot watch a socket: " + errno_text(errno), {.system_errno = errno});
}

void TcpStoreServer::poll_once() {
  int wait_ms = -1;
  if (!deadlines_.empty()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadlines_.begin()->first - Clock::now());
    wait_ms = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
  }
  std::array<epoll_event, 256> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms);
  if (count < 0 && errno != EINTR) {
    stop_ = true;  // it would fail at once for ever
    throw SystemError("it ends, as its descriptors cannot be waited for: " + errno_text(errno) +
                          "; close none in this process that others have opened",
                      {.system_errno = errno});
  }
  bool has_new = false;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.ptr == &listener_) {
      has_new = true;
    } else if (event.data.ptr == &wake_) {
      stop_ = true;
      free_port_and_clients();
    } else {
      auto& client = *static_cast<Client*>(event.data.ptr);
      if (client.fd && (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive(client);
      if (client.fd && (event.events & EPOLLOUT) != 0) send(client);
    }
  }
  const auto now = Clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Client& client = *deadlines_.begin()->second;
    if (client.awaited)
      reply(client, status_timeout, *client.awaited);
    else
      drop(client);
  }
  if (has_new && !stop_) accept_all();
  gone_.clear();
}

void TcpStoreServer::accept_all() {
  for (int i = 0; i < max_new_clients; ++i) {
    auto fd = accept_one(listener_.get());
    if (!fd) return;
    // The oldest had the longest chance.
    const bool is_full = strangers_.size() + clients_.size() >= max_clients_;
    if (!strangers_.empty() && (is_full || strangers_.size() >= max_silent_clients))
      drop(strangers_.front(), "too many connections at once");
    tune_socket(fd.get(), std::nullopt);
    Client& client = strangers_.emplace_back();
    client.self = std::prev(strangers_.end());
    client.fd = std::move(fd);
    if (strangers_.size() + clients_.size() > max_clients_) {
      drop(client, std::to_string(max_clients_) + " are open already (raise ulimit -n for more)");
      continue;
    }
    try {
      client.uninherited.emplace(std::vector<int>{client.fd.get()});
      watch(client.fd.get(), &client);
    } catch (...) {
      drop(client);
      throw;
    }
    set_deadline(client, Clock::now() + request_timeout);
  }
}

void TcpStoreServer::know(Client& client) {
  if (client.is_known) return;
  client.is_known = true;
  clients_.splice(clients_.end(), strangers_, client.self);
}

void TcpStoreServer::drop(Client& client, const std::string& reason) {
  if (!reason.empty()) {
    const auto remote = SocketAddress::remote_of(client.fd.get());
    log_of_stranger(std::nullopt, "store: dropped a connection from " + (remote ? remote->text() : "unknown address") +
                                      ": " + reason);
  }
  expect_nothing(client);
  set_deadline(client, Clock::time_point::max());
  buffered_bytes_ -= client.input.size();
  // As in free_port_and_clients.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, client.fd.get(), nullptr);
  ::shutdown(client.fd.get(), SHUT_RDWR);
  client.uninherited.reset();
  client.fd.reset();
  gone_.splice(gone_.end(), client.is_known ? clients_ : strangers_, client.self);
}

void TcpStoreServer::set_deadline(Client& client, Clock::time_point deadline) {
  if (client.deadline) deadlines_.erase(*client.deadline);
  client.deadline.reset();
  if (client.fd && deadline != Clock::time_point::max()) client.deadline = deadlines_.emplace(deadline, &client);
}

void TcpStoreServer::expect(Client& client, const std::string& key) {
  client.awaited = key;
  client.awaited_since = ++waits_;
  waiting_[key].emplace(client.awaited_since, &client);
}

void TcpStoreServer::expect_nothing(Client& client) {
  if (!client.awaited) return;
  const auto others = waiting_.find(*client.awaited);
  others->second.erase(client.awaited_since);
  if (others->second.empty()) waiting_.erase(others);
  client.awaited.reset();
}

void TcpStoreServer::receive(Client& client) {
  std::array<char, 65536> chunk;
  const ssize_t got = ::recv(client.fd.get(), chunk.data(), chunk.size(), 0);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) return drop(client);
  // One request at a time, and nothing while the last reply is not taken.
  if (client.awaited || !client.output.empty())
    return drop(client, "it sent a request before it had the reply to the last one");
  if (client.is_known && client.input.empty()) set_deadline(client, Clock::now() + request_timeout);
  client.input.append(chunk.data(), static_cast<std::size_t>(got));
  buffered_bytes_ += static_cast<std::size_t>(got);
  auto parsed = parse(client.input);
  if (parsed.request) {
    buffered_bytes_ -= client.input.size();
    client.input = {};
    if (!handle(client, std::move(*parsed.request)))
      drop(client, "it did not prove the job's secret; give every rank the same HOLMES_SECRET or HOLMES_SECRET_FILE");
  } else if (parsed.is_wrong) {
    drop(client, "what it sent is no request");
  } else if (buffered_bytes_ > max_buffered_bytes) {
    drop_largest();
  }
}

// Who holds most, so that small requests are served whatever others send.
void TcpStoreServer::drop_largest() {
  const auto by_size = [](const Client& one, const Client& other) { return one.input.size() < other.input.size(); };
  auto largest = std::ranges::max_element(clients_, by_size);
  const auto stranger = std::ranges::max_element(strangers_, by_size);
  if (largest == clients_.end() || (stranger != strangers_.end() && by_size(*largest, *stranger))) largest = stranger;
  drop(*largest, "too many bytes of unfinished requests");
}

bool TcpStoreServer::handle(Client& client, Request request) {
  if (request.operation == op_hello || request.operation == op_prove) return authenticate(client, request);
  if (!secret_.empty() && !client.is_known) {
    reply(client, status_refused);
    return true;
  }
  know(client);
  set_deadline(client, Clock::time_point::max());
  try {
    if (request.operation == op_get || request.operation == op_wait) {
      client.wanted = std::move(request.texts);
      client.wants_values = request.operation == op_get;
      set_deadline(client, Clock::now() + std::chrono::milliseconds(request.wait_ms));
      look(client);
    } else {
      reply(client, status_ok, carry_out(request));
    }
  } catch (const UsageError& error) {
    reply(client, status_wrong, error.what());
  }
  return true;
}

std::string TcpStoreServer::carry_out(Request& request) {
  std::string value;
  switch (request.operation) {
    case op_check:
      return values_.missing(request.texts) ? "" : "1";
    case op_count:
      put_number(value, values_.size(), 8);
      return value;
    case op_remove:
      put_number(value, values_.remove(request.texts), 8);
      return value;
    case op_add:
      put_number(value,
                 static_cast<std::uint64_t>(
                     values_.add(request.key, static_cast<std::int64_t>(number_at(request.value, 0, 8)))),
                 8);
      break;
    case op_compare_set:
      value = values_.compare_set(request.key, request.texts[0], request.texts[1]);
      break;
    default:
      values_.set(request.key, std::move(request.value));
  }
  tell_waiting(request.key);
  return value;
}

void TcpStoreServer::look(Client& client) {
  if (const std::string* const missing = values_.missing(client.wanted)) return expect(client, *missing);
  std::string values;
  if (client.wants_values) {
    std::size_t bytes = 0;
    for (const std::string& key : client.wanted) bytes += 4 + values_.find(key)->size();
    if (bytes > max_reply_bytes)
      throw UsageError("the values of these " + std::to_string(client.wanted.size()) + " store keys have " +
                       std::to_string(bytes) + " bytes together; a reply has up to " + std::to_string(max_reply_bytes) +
                       ": ask for fewer keys at once");
    values.reserve(bytes);
    for (const std::string& key : client.wanted) values += join(std::span(values_.find(key), 1));
  }
  reply(client, status_ok, values);
}

void TcpStoreServer::tell_waiting(const std::string& key) {
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  for (const auto& [since, client] : std::map(found->second)) {
    expect_nothing(*client);
    try {
      look(*client);
    } catch (const UsageError& error) {
      reply(*client, status_wrong, error.what());
    }
  }
}

bool TcpStoreServer::authenticate(Client& client, const Request& request) {
  if (client.is_known) return false;
  if (request.operation == op_hello) {
    if (secret_.empty()) {
      reply(client, status_refused);
      return true;
    }
    const auto own_nonce = random_bytes(nonce_bytes);
    client.expected_proof = proof(secret_, false, request.key, own_nonce);
    client.own_proof = proof(secret_, true, request.key, own_nonce);
    reply(client, status_ok, own_nonce);
    set_deadline(client, Clock::now() + request_timeout);
    return true;
  }
  if (client.expected_proof.empty() || !equal_texts(request.key, client.expected_proof)) return false;
  client.expected_proof.clear();
  know(client);
  reply(client, status_ok, client.own_proof);
  return true;
}

void TcpStoreServer::reply(Client& client, char status, const std::string& value) {
  set_deadline(client, Clock::now() + reply_timeout);
  client.output += status;
  put_number(client.output, value.size(), 4);
  client.output += value;
  expect_nothing(client);  // `value` may be what it awaits
  send(client);
}

void TcpStoreServer::send(Client& client) {
  const ssize_t sent = ::send(client.fd.get(), client.output.data(), client.output.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return drop(client);
  client.output.erase(0, static_cast<std::size_t>(std::max<ssize_t>(sent, 0)));
  if (client.output.empty() && client.is_known) set_deadline(client, Clock::time_point::max());
  if (client.waits_for_room == !client.output.empty()) return;
  client.waits_for_room = !client.output.empty();
  epoll_event event{.events = EPOLLIN | (client.waits_for_room ? EPOLLOUT : 0u), .data = {.ptr = &client}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, client.fd.get(), &event);
}

}  // namespace holmes
