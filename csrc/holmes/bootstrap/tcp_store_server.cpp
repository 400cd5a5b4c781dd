#include "holmes/bootstrap/tcp_store_server.hpp"

#include <netdb.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>

#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/core/log.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {
namespace store_protocol {

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

}  // namespace store_protocol

namespace {

using namespace std::chrono_literals;
using namespace store_protocol;

constexpr std::size_t max_clients = 8192;
constexpr std::size_t max_stored_bytes = std::size_t{1} << 30;
constexpr Duration first_request_timeout = 10s;
constexpr std::uint64_t max_wait_ms = std::uint64_t{365} * 24 * 3600 * 1000;

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
    throw SystemError("the store cannot listen on " + host + ":" + std::to_string(port) + ": " + errno_text(errno) +
                          "; choose an address of this machine and a free port (0: any)",
                      {.system_errno = errno});
  }
  return fd;
}

}  // namespace

TcpStoreServer::TcpStoreServer(const std::string& host, std::uint16_t port)
    : listener_(listen_on(host, port)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw SystemError("the store cannot make an eventfd: " + errno_text(errno), {.system_errno = errno});
  port_ = SocketAddress::local_of(listener_.get()).value().port();
  thread_ = std::thread([this] { run(); });
}

TcpStoreServer::~TcpStoreServer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
  thread_.join();
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

void TcpStoreServer::poll_once() {
  std::vector<pollfd> fds;
  auto wake_at = Clock::time_point::max();
  for (const auto& client : clients_) {
    fds.push_back({client.fd.get(), static_cast<short>(client.output.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    wake_at = std::min(wake_at, client.deadline);
  }
  fds.push_back({wake_.get(), POLLIN, 0});
  fds.push_back({listener_.get(), POLLIN, 0});
  int wait_ms = -1;
  if (wake_at != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(wake_at - Clock::now());
    wait_ms = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
  }
  if (::poll(fds.data(), fds.size(), wait_ms) < 0) return;

  const std::size_t known = clients_.size();
  const auto now = Clock::now();
  for (std::size_t i = 0; i < known; ++i) {
    auto& client = clients_[i];
    bool keep = true;
    if ((fds[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) keep = receive(client);
    if (keep && now >= client.deadline) {
      keep = client.is_known;
      if (keep) reply(client, status_timeout);
    }
    if (!keep) client.fd.reset();
  }
  for (auto& client : clients_) {  // also the ones a set of another has answered
    if (client.fd && !client.output.empty() && !send(client)) client.fd.reset();
  }
  std::erase_if(clients_, [](const Client& client) { return !client.fd; });
  if (fds[known].revents != 0) stop_ = true;
  if (fds[known + 1].revents != 0) accept_all();
}

void TcpStoreServer::accept_all() {
  while (auto fd = accept_one(listener_.get())) {
    if (clients_.size() >= max_clients) {
      log(LogLevel::warn, std::nullopt,
          "store: dropped a connection: " + std::to_string(max_clients) + " are open already");
      continue;
    }
    tune_socket(fd.get(), std::nullopt);
    clients_.emplace_back();
    clients_.back().fd = std::move(fd);
    clients_.back().deadline = Clock::now() + first_request_timeout;
  }
}

bool TcpStoreServer::receive(Client& client) {
  std::array<char, 65536> chunk;
  const ssize_t got = ::recv(client.fd.get(), chunk.data(), chunk.size(), 0);
  if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (got == 0) return false;
  client.input.append(chunk.data(), static_cast<std::size_t>(got));
  if (handle_request(client)) return true;
  const auto remote = SocketAddress::remote_of(client.fd.get());
  log(LogLevel::warn, std::nullopt,
      "store: dropped a connection from " + (remote ? remote->text() : "unknown address") +
          ": what it sent is no request");
  return false;
}

// False where the input cannot become a request. A client has one request at a time.
bool TcpStoreServer::handle_request(Client& client) {
  const auto& input = client.input;
  const auto prefix = std::min(input.size(), magic.size());
  if (input.compare(0, prefix, magic.substr(0, prefix)) != 0) return false;
  if (input.size() < request_header_bytes) return true;
  const char operation = input[4];
  const auto key_bytes = number_at(input, 5, 4), value_bytes = number_at(input, 9, 4);
  const auto wait_ms = number_at(input, 13, 8);
  if (client.awaited || !client.output.empty() || key_bytes > TcpStore::max_key_bytes ||
      value_bytes > TcpStore::max_value_bytes || wait_ms > max_wait_ms || (operation != op_set && value_bytes != 0)) {
    return false;
  }
  const auto request_bytes = request_header_bytes + key_bytes + value_bytes;
  if (input.size() > request_bytes) return false;
  if (input.size() < request_bytes) return true;
  const auto key = input.substr(request_header_bytes, key_bytes);
  auto value = input.substr(request_header_bytes + key_bytes);
  client.input = {};
  client.is_known = true;
  client.deadline = Clock::time_point::max();
  if (operation == op_set) {
    set(client, key, std::move(value));
  } else if (operation == op_get || operation == op_wait) {
    const auto found = values_.find(key);
    client.wants_value = operation == op_get;
    if (found != values_.end()) {
      reply(client, status_ok, client.wants_value ? found->second : "");
    } else {
      client.awaited = key;
      client.deadline = Clock::now() + std::chrono::milliseconds(wait_ms);
    }
  } else {
    return false;
  }
  return true;
}

void TcpStoreServer::set(Client& client, const std::string& key, std::string value) {
  const auto old = values_.find(key);
  const auto bytes =
      stored_bytes_ + key.size() + value.size() - (old == values_.end() ? 0 : key.size() + old->second.size());
  if (bytes > max_stored_bytes) return reply(client, status_full);
  stored_bytes_ = bytes;
  const auto& stored = values_.insert_or_assign(key, std::move(value)).first->second;
  for (auto& other : clients_) {
    if (other.fd && other.awaited == key) reply(other, status_ok, other.wants_value ? stored : "");
  }
  reply(client, status_ok);
}

void TcpStoreServer::reply(Client& client, char status, const std::string& value) {
  client.awaited.reset();
  client.deadline = Clock::time_point::max();
  client.output += status;
  put_number(client.output, value.size(), 4);
  client.output += value;
}

bool TcpStoreServer::send(Client& client) {
  const ssize_t sent = ::send(client.fd.get(), client.output.data(), client.output.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  client.output.erase(0, static_cast<std::size_t>(sent));
  return true;
}

}  // namespace holmes
