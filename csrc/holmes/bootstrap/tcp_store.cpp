#include "holmes/bootstrap/tcp_store.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "holmes/bootstrap/secret.hpp"
#include "holmes/bootstrap/sha256.hpp"
#include "holmes/bootstrap/tcp_store_server.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/interrupt.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;
using namespace store_protocol;

constexpr Duration retry_delay = 50ms;
constexpr Duration mended_within = 1s;  // by who sets this host up, what does not mend itself
constexpr Duration max_wait = std::chrono::hours(24 * 300);

// False where the deadline passes first.
bool wait_for(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto until = std::min(deadline, SignalTimer().due().value_or(deadline));
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000)));
    if (ready > 0) return true;
    if (Clock::now() >= deadline) return false;
    check_signals();
  }
}

// Sends or receives all of `size` bytes; returns 0 or the errno.
template <class Transfer>
int transfer_all(int fd, short events, std::size_t size, Clock::time_point deadline, Transfer transfer) {
  std::size_t done = 0;
  while (done < size) {
    const ssize_t moved = transfer(done);
    if (moved > 0) {
      done += static_cast<std::size_t>(moved);
    } else if (moved == 0) {
      return ECONNRESET;
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      return errno;
    } else if (!wait_for(fd, events, deadline)) {
      return ETIMEDOUT;
    }
  }
  return 0;
}

int receive_all(int fd, std::string& bytes, Clock::time_point deadline) {
  return transfer_all(fd, POLLIN, bytes.size(), deadline,
                      [&](std::size_t done) { return ::recv(fd, bytes.data() + done, bytes.size() - done, 0); });
}

int send_all(int fd, const std::string& bytes, Clock::time_point deadline) {
  return transfer_all(fd, POLLOUT, bytes.size(), deadline, [&](std::size_t done) {
    return ::send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
  });
}

struct NoConnection {
  std::string problem;
  bool is_lasting = false;  // somebody must do something
};

// One try over all addresses of the host. No socket where it fails; `failure` says why.
UniqueFd connect_once(const std::string& host, std::uint16_t port, Clock::time_point deadline, NoConnection& failure) {
  failure = {};
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) {
    failure.problem = ::gai_strerror(error);
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    UniqueFd fd(::socket(entry->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) throw SystemError("cannot open a socket: " + errno_text(errno), {.system_errno = errno});
    int error = ::connect(fd.get(), entry->ai_addr, entry->ai_addrlen) == 0 ? 0 : errno;
    const bool is_reached = error == 0 || error == ECONNREFUSED;
    const std::string why = is_reached ? "" : why_not_itself(SocketAddress::from(entry->ai_addr, entry->ai_addrlen));
    failure.is_lasting |= !why.empty();
    if (error == EINPROGRESS && !why.empty()) {  // nothing comes
      failure.problem = "no answer" + why;
      continue;
    }
    if (error == EINPROGRESS) {
      error = wait_for(fd.get(), POLLOUT, deadline) ? socket_error(fd.get()) : ETIMEDOUT;
    }
    if (error == 0) {
      tune_socket(fd.get(), std::nullopt);
      return fd;
    }
    failure.problem = errno_text(error) + why;
  }
  return {};
}

// A request's reply.
struct Reply {
  int error = 0;  // errno; then nothing else holds
  bool is_wrong = false;
  char status = 0;
  std::string value;
};

Reply exchange(int fd, const Request& request, Clock::time_point deadline) {
  std::string header(reply_header_bytes, '\0');
  Reply reply;
  reply.error = send_all(fd, request.encode(), deadline);
  if (reply.error == 0) reply.error = receive_all(fd, header, deadline);
  if (reply.error != 0) return reply;
  const auto bytes = number_at(header, 1, 4);
  reply.status = header[0];
  reply.is_wrong = bytes > max_reply_bytes;
  if (reply.is_wrong) return reply;
  reply.value.resize(bytes);
  reply.error = receive_all(fd, reply.value, deadline);
  return reply;
}

}  // namespace

TcpStore::TcpStore(std::string host, std::uint16_t port, bool is_server, Duration timeout, const std::string& secret,
                   Duration reply_timeout)
    : host_(std::move(host)),
      port_(port),
      secret_(given_secret(secret, Env::read()).value_or("")),
      epoch_(fork_epoch()),
      timeout_(std::min(timeout, max_wait)),
      reply_timeout_(std::min(reply_timeout, max_wait)),
      idle_epoch_(epoch_) {
  hold_standard_descriptors();
  if (is_server) {
    server_ = std::make_unique<TcpStoreServer>(host_, port_, secret_);
    port_ = server_->port();
  }
  idle_.push_back(connect(timeout_));
}

TcpStore::~TcpStore() {
  if (epoch_ == fork_epoch() && (!server_ || server_->end())) return;
  // In a forked child its thread and keys are the parent's; one that cannot be told to end goes on.
  [[maybe_unused]] auto* const left = server_.release();
}

UniqueFd TcpStore::connect(Duration timeout) {
  const auto begin = Clock::now();
  const auto deadline = begin + timeout;
  NoConnection failure;
  while (true) {
    if (auto fd = connect_once(host_, port_, deadline, failure)) {
      introduce(fd.get(), std::max(deadline, Clock::now() + reply_timeout_));
      return fd;
    }
    const auto end = failure.is_lasting ? std::min(deadline, begin + mended_within) : deadline;
    if (Clock::now() + retry_delay >= end) break;
    check_signals();
    std::this_thread::sleep_for(retry_delay);
  }
  throw UnreachableError(where() + " cannot be reached: " + failure.problem +
                         "; check the address and that the process that serves it runs");
}

void TcpStore::introduce(int fd, Clock::time_point deadline) const {
  const std::string fix = "; give every process of the job the same HOLMES_SECRET or HOLMES_SECRET_FILE";
  const auto ask = [&](Request request) {
    auto reply = exchange(fd, request, deadline);
    if (reply.error != 0) throw_lost(reply.error);
    return reply;
  };
  if (secret_.empty()) {  // any request: who never sends one is dropped soon
    if (ask({.operation = op_count, .key = "", .value = ""}).status == status_refused)
      throw ProtocolError(where() + " serves only who proves the job's secret, and this process was given none" + fix);
    return;
  }
  const auto own_nonce = random_bytes(nonce_bytes);
  auto reply = ask({.operation = op_hello, .key = own_nonce, .value = ""});
  if (reply.status == status_refused) throw ProtocolError(where() + " was given no secret, but this process was" + fix);
  if (reply.is_wrong || reply.status != status_ok || reply.value.size() != nonce_bytes) throw_no_store();
  const auto their_nonce = reply.value;
  reply = exchange(fd, {.operation = op_prove, .key = proof(secret_, false, own_nonce, their_nonce), .value = ""},
                   deadline);
  // It says nothing to who does not know its secret.
  if (reply.error == ECONNRESET || reply.error == EPIPE)
    throw ProtocolError(where() + " has another secret than this process: it dropped the connection at the proof" +
                        fix);
  if (reply.error != 0) throw_lost(reply.error);
  if (reply.is_wrong || !equal_texts(reply.value, proof(secret_, true, own_nonce, their_nonce)))
    throw ProtocolError(where() +
                        " did not prove the job's secret: something else listens there in its place; check the address "
                        "and who serves that port");
}

void TcpStore::throw_lost(int error) const {
  std::string problem = where() + " is lost: " + errno_text(error) + "; check that the process that serves it runs";
  // Small requests pass where large ones are lost; nothing else tells of a path whose packets are smaller.
  if (error == ETIMEDOUT)
    problem += ", and that packets as large as the NICs' MTU get there (ping -M do -s, with the MTU less 28)";
  throw UnreachableError(problem, {.system_errno = error});
}

void TcpStore::throw_no_store() const {
  throw ProtocolError("what listens on " + host_ + ":" + std::to_string(port_) + " is no store");
}

std::string TcpStore::call(Request request, Duration timeout) {
  std::size_t key_bytes = request.key.size(), value_bytes = request.value.size();
  for (const std::string& text : request.texts) {
    value_bytes += 4 + text.size();
    if (request.operation != op_compare_set) key_bytes = std::max(key_bytes, text.size());
  }
  if (key_bytes > max_key_bytes || value_bytes > max_value_bytes) {
    throw UsageError("the store takes keys up to " + std::to_string(max_key_bytes) + " bytes and requests up to " +
                     std::to_string(max_value_bytes) + " bytes; this one's longest key has " +
                     std::to_string(key_bytes) + ", the rest " + std::to_string(value_bytes));
  }
  UniqueFd fd;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(idle_epoch_, fork_epoch()) != fork_epoch()) idle_.clear();  // the parent's
    if (!idle_.empty()) {
      fd = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!fd) fd = connect(timeout_);
  const auto wait = std::clamp(timeout, Duration::zero(), max_wait);
  request.wait_ms = static_cast<std::uint64_t>(std::chrono::ceil<std::chrono::milliseconds>(wait).count());
  auto reply = exchange(fd.get(), request, Clock::now() + wait + reply_timeout_);
  if (reply.error != 0) throw_lost(reply.error);
  if (reply.is_wrong) throw_no_store();
  {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(fd));
  }
  switch (reply.status) {
    case status_ok:
      return std::move(reply.value);
    case status_timeout:
      throw store_timeout(reply.value, timeout);
    case status_wrong:
      throw UsageError(reply.value);
    default:
      throw_no_store();
  }
}

std::uint64_t TcpStore::call_for_number(Request request) {
  const std::string reply = call(std::move(request));
  if (reply.size() != 8) throw_no_store();
  return number_at(reply, 0, 8);
}

void TcpStore::set(const std::string& key, const std::string& value) {
  call({.operation = op_set, .key = key, .value = value});
}

std::string TcpStore::get(const std::string& key, Duration timeout) {
  return std::move(multi_get(std::span(&key, 1), timeout).front());
}

void TcpStore::wait(const std::string& key, Duration timeout) {
  call({.operation = op_wait, .key = "", .value = "", .texts = {key}}, timeout);
}

std::vector<std::string> TcpStore::multi_get(std::span<const std::string> keys, Duration timeout) {
  auto values =
      split(call({.operation = op_get, .key = "", .value = "", .texts = {keys.begin(), keys.end()}}, timeout));
  if (!values || values->size() != keys.size()) throw_no_store();
  return std::move(*values);
}

bool TcpStore::check(std::span<const std::string> keys) {
  return !call({.operation = op_check, .key = "", .value = "", .texts = {keys.begin(), keys.end()}}).empty();
}

std::size_t TcpStore::remove(std::span<const std::string> keys) {
  return call_for_number({.operation = op_remove, .key = "", .value = "", .texts = {keys.begin(), keys.end()}});
}

std::int64_t TcpStore::add(const std::string& key, std::int64_t amount) {
  std::string bytes;
  put_number(bytes, static_cast<std::uint64_t>(amount), 8);
  return static_cast<std::int64_t>(call_for_number({.operation = op_add, .key = key, .value = bytes}));
}

std::string TcpStore::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  return call({.operation = op_compare_set, .key = key, .value = "", .texts = {expected, desired}});
}

std::size_t TcpStore::num_keys() { return call_for_number({.operation = op_count, .key = "", .value = ""}); }

}  // namespace holmes
