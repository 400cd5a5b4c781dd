#include "sim/network.hpp"

#include <linux/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "holmes/bootstrap/tcp_store_server.hpp"

namespace holmes::sim {
namespace {

constexpr std::size_t window_bytes = 256 << 10;  // on their way or unread, of one direction
constexpr Time repeat_after = 1 * second;        // a connection that the listener had no room for
// What the library sets for all of its sockets; without an answer for so long they end.
constexpr Time keeps_alive_for = 60 * second, first_probe_after = 20 * second;
constexpr Time spin = 1 * microsecond;           // a look in vain takes
constexpr std::uint64_t handshake_messages = 2;  // of each side
constexpr std::string_view hello_magic = "HOLMES\r\n";
constexpr std::size_t hello_purpose = 10;  // where the purpose is in it

Network* the_network = nullptr;

std::uint64_t place(in_addr_t address, std::uint16_t port) { return std::uint64_t{address} << 16 | port; }

}  // namespace

Network& network() { return *the_network; }

// --- descriptors ---

struct Network::File {
  struct Waiter {
    Fiber* fiber = nullptr;
    std::uint64_t wait = 0;
    short events = 0;
    bool waits() const { return fiber && fiber->state == Fiber::State::blocked && fiber->waits == wait; }
  };

  virtual ~File() = default;
  // What poll says of it.
  virtual short ready() = 0;

  void add_waiter(Fiber& fiber, short events) {
    const Waiter added{&fiber, fiber.waits + 1, events};  // the wait that is about to begin
    if (waiter.fiber == &fiber || !waiter.waits()) {
      waiter = added;
      return;
    }
    if (!others) others = std::make_unique<std::vector<Waiter>>();
    std::erase_if(*others, [&](const Waiter& one) { return one.fiber == &fiber || !one.waits(); });
    others->push_back(added);
  }

  int number = -1;
  int process = -1;
  int epoll = -1;  // that watches it
  bool is_listed = false;
  std::uint64_t epoll_data = 0;
  std::uint32_t epoll_events = 0;
  std::uint32_t epoll_ready() { return static_cast<std::uint32_t>(ready()) & (epoll_events | EPOLLERR | EPOLLHUP); }
  Waiter waiter;
  std::unique_ptr<std::vector<Waiter>> others;
};

struct Network::Socket final : File {
  struct Segment {
    Time arrives;
    std::string bytes;
    int end;  // 0: none; -1: in order; else the errno
  };
  struct Inbox {
    std::deque<Segment> on_the_way;
    std::string bytes;
    std::size_t taken = 0;   // of bytes
    std::size_t queued = 0;  // on the way or unread
  };
  enum class State : std::uint8_t { fresh, connecting, connected, refused };

  std::size_t unread() const { return inbox ? inbox->bytes.size() - inbox->taken : 0; }
  bool has_room() const {
    const auto* const to = static_cast<const Socket*>(the_network->file(peer));
    return !to || !to->inbox || to->inbox->queued < window_bytes;
  }
  short ready() override {
    if (state == State::fresh) return POLLOUT | POLLHUP;
    if (state == State::connecting) return 0;
    int events = error != 0 ? POLLERR : 0;
    if (has_ended || error != 0 || unread() >= static_cast<std::size_t>(low_water)) events |= POLLIN;
    if (error != 0 || has_shut || has_room()) events |= POLLOUT;
    if (has_ended && (has_shut || was_reset)) events |= POLLHUP;
    return static_cast<short>(events);
  }

  std::unique_ptr<Inbox> inbox;  // where there is something in it
  int peer = -1;
  int error = 0;  // told once
  int low_water = 1;
  int user_timeout_ms = 0;  // for what is not acknowledged
  in_addr_t local_address = 0, remote_address = 0;
  std::uint16_t local_port = 0, remote_port = 0;
  State state = State::fresh;
  Use use = Use::unknown;
  std::uint8_t sent_messages = 0;  // up to those of the handshake
  bool has_ended = false;          // the peer sends nothing more
  bool has_shut = false;           // nor does this side
  bool was_reset = false;
};

struct Network::Listener final : File {
  short ready() override { return static_cast<short>(queue.empty() ? 0 : POLLIN); }
  std::deque<int> queue;
  std::size_t backlog = 0;
  std::uint64_t at = 0;
  in_addr_t address = 0;
  std::uint16_t port = 0;
};

struct Network::Event final : File {
  short ready() override { return static_cast<short>(count > 0 ? POLLIN | POLLOUT : POLLOUT); }
  std::uint64_t count = 0;
};

struct Network::Timer final : File {
  short ready() override { return static_cast<short>(has_rung ? POLLIN : 0); }
  Time at = never;
  Time looks_at = never;  // when an event does
  bool has_rung = false;
};

struct Network::Epoll final : File {
  short ready() override {
    while (!listed.empty()) {
      File* const first = the_network->file(listed.back());
      if (first && first->epoll == number && first->epoll_ready() != 0) return POLLIN;
      if (first) first->is_listed = false;
      listed.pop_back();
    }
    return 0;
  }
  std::vector<int> listed;  // that were ready when they changed
};

Network::Network(const Paths& paths) : paths_(paths) { the_network = this; }
Network::~Network() { the_network = nullptr; }

int Network::own_process() const { return current_fiber()->process->number; }

template <typename Kind>
int Network::add(std::unique_ptr<Kind> made) {
  made->number = first_descriptor + static_cast<int>(files_.size());
  if (made->process < 0) made->process = own_process();
  ++traffic(made->process).descriptors;
  files_.push_back(std::move(made));
  return files_.back()->number;
}

Network::File* Network::file(int fd) {
  const auto index = static_cast<std::size_t>(fd - first_descriptor);
  return fd >= first_descriptor && index < files_.size() ? files_[index].get() : nullptr;
}

// Of the running process.
template <typename Kind>
Kind* Network::find(int fd) {
  auto* const found = dynamic_cast<Kind*>(file(fd));
  if (found && found->process == own_process()) return found;
  ++misuses_;
  return nullptr;
}

Traffic& Network::traffic(int process) {
  const auto index = static_cast<std::size_t>(process);
  if (index >= traffic_.size()) traffic_.resize(index + 1);
  return traffic_[index];
}

void Network::notify(File& changed) {
  const short ready = changed.ready();
  if (ready == 0) return;
  const auto tell = [&](const File::Waiter& waiter) {
    if (waiter.waits() && (ready & (waiter.events | POLLERR | POLLHUP)) != 0) scheduler().wake(*waiter.fiber);
  };
  tell(changed.waiter);
  if (changed.others) std::ranges::for_each(*changed.others, tell);
  if (changed.epoll < 0 || changed.is_listed || changed.epoll_ready() == 0) return;
  auto* const epoll = static_cast<Epoll*>(file(changed.epoll));
  if (!epoll) return;
  changed.is_listed = true;
  epoll->listed.push_back(changed.number);
  notify(*epoll);
}

// --- sockets ---

int Network::open_socket() { return add(std::make_unique<Socket>()); }

int Network::bind(int fd, const sockaddr_in& address) {
  auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  if (address.sin_port != 0 && listeners_.contains(place(address.sin_addr.s_addr, ntohs(address.sin_port))))
    return -EADDRINUSE;
  if (address.sin_addr.s_addr != address_of(socket->process)) return -EADDRNOTAVAIL;
  socket->local_address = address.sin_addr.s_addr;
  socket->local_port = ntohs(address.sin_port);
  return 0;
}

int Network::listen(int fd, int backlog) {
  const auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  auto made = std::make_unique<Listener>();
  made->number = fd;
  made->process = socket->process;
  made->backlog = static_cast<std::size_t>(backlog);
  made->address = socket->local_address;
  made->port = socket->local_port;
  auto& next = next_ports_.try_emplace(made->process, 10'000).first->second;
  while (made->port == 0 || listeners_.contains(place(made->address, made->port))) made->port = next++;
  made->at = place(made->address, made->port);
  listeners_[made->at] = fd;
  files_[static_cast<std::size_t>(fd - first_descriptor)] = std::move(made);
  return 0;
}

Time Network::arrival(const Socket& at) {
  Time takes = paths_.latency + static_cast<Time>(scheduler().below(static_cast<std::uint64_t>(paths_.jitter) + 1));
  if (paths_.slow_of_1000 > 0 && scheduler().below(1000) < paths_.slow_of_1000)
    takes += static_cast<Time>(scheduler().below(static_cast<std::uint64_t>(paths_.slow)));
  const Time arrives = (scheduler().now() + takes) / paths_.tick * paths_.tick;
  const bool has_before = at.inbox && !at.inbox->on_the_way.empty();
  return has_before ? std::max(arrives, at.inbox->on_the_way.back().arrives) : arrives;
}

int Network::connect(int fd, const sockaddr_in& address) {
  auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  if (socket->state == Socket::State::connecting) return -EALREADY;
  if (socket->state == Socket::State::connected) return -EISCONN;
  socket->local_address = address_of(socket->process);
  if (socket->local_port == 0) socket->local_port = next_ports_.try_emplace(socket->process, 10'000).first->second++;
  socket->remote_address = address.sin_addr.s_addr;
  socket->remote_port = ntohs(address.sin_port);
  socket->state = Socket::State::connecting;
  scheduler().at(arrival(*socket), arrive, static_cast<std::uint64_t>(fd));
  return -EINPROGRESS;
}

// At the host that it leads to.
void Network::arrive(std::uint64_t fd) {
  Network& own = *the_network;
  auto* const socket = static_cast<Socket*>(own.file(static_cast<int>(fd)));
  if (!socket) return;
  const auto found = own.listeners_.find(place(socket->remote_address, socket->remote_port));
  if (found == own.listeners_.end()) return scheduler().at(own.arrival(*socket), refuse, fd);
  auto& listener = static_cast<Listener&>(*own.file(found->second));
  if (listener.queue.size() > listener.backlog) return scheduler().at(scheduler().now() + repeat_after, arrive, fd);
  auto accepted = std::make_unique<Socket>();
  accepted->process = listener.process;
  accepted->peer = socket->number;
  accepted->state = Socket::State::connected;
  accepted->local_address = socket->remote_address;
  accepted->local_port = socket->remote_port;
  accepted->remote_address = socket->local_address;
  accepted->remote_port = socket->local_port;
  listener.queue.push_back(socket->peer = own.add(std::move(accepted)));
  own.notify(listener);
  scheduler().at(own.arrival(*socket), establish, fd);
}

void Network::establish(std::uint64_t fd) {
  auto* const socket = static_cast<Socket*>(the_network->file(static_cast<int>(fd)));
  if (!socket || socket->state != Socket::State::connecting) return;
  socket->state = Socket::State::connected;
  the_network->notify(*socket);
}

void Network::refuse(std::uint64_t fd) {
  auto* const socket = static_cast<Socket*>(the_network->file(static_cast<int>(fd)));
  if (!socket) return;
  socket->state = Socket::State::refused;
  socket->error = ECONNREFUSED;
  socket->has_ended = socket->was_reset = true;
  the_network->notify(*socket);
}

int Network::accept(int fd) {
  auto* const listener = find<Listener>(fd);
  if (!listener) return -EBADF;
  while (!listener->queue.empty()) {
    const int first = listener->queue.front();
    listener->queue.pop_front();
    if (file(first)) return first;
  }
  return -EAGAIN;
}

void Network::enqueue(Socket& to, Time arrives, std::string bytes, int end) {
  if (!to.inbox) to.inbox = std::make_unique<Socket::Inbox>();
  to.inbox->queued += bytes.size();
  to.inbox->on_the_way.push_back({arrives, std::move(bytes), end});
  scheduler().at(arrives, deliver, static_cast<std::uint64_t>(to.number));
}

void Network::deliver(std::uint64_t fd) {
  auto* const socket = static_cast<Socket*>(the_network->file(static_cast<int>(fd)));
  if (!socket || !socket->inbox || socket->inbox->on_the_way.empty()) return;
  auto& inbox = *socket->inbox;
  const auto segment = std::move(inbox.on_the_way.front());
  inbox.on_the_way.pop_front();
  if (inbox.taken == inbox.bytes.size()) inbox.bytes.clear(), inbox.taken = 0;
  inbox.bytes += segment.bytes;
  if (segment.end > 0) socket->error = segment.end, socket->was_reset = true;
  if (segment.end != 0) socket->has_ended = true;
  the_network->notify(*socket);
}

// Sent to who is no more.
void Network::reset(std::uint64_t fd) {
  auto* const socket = static_cast<Socket*>(the_network->file(static_cast<int>(fd)));
  if (!socket || socket->was_reset) return;
  socket->error = ECONNRESET;
  socket->was_reset = socket->has_ended = true;
  the_network->notify(*socket);
}

// Nothing came back from the peer's host for too long.
void Network::expire(std::uint64_t fd) {
  auto* const socket = static_cast<Socket*>(the_network->file(static_cast<int>(fd)));
  if (!socket || socket->was_reset || socket->has_ended) return;
  socket->error = ETIMEDOUT;
  socket->was_reset = socket->has_ended = true;
  the_network->notify(*socket);
}

void Network::learn_use(Socket& from, Socket* to, std::span<const char> begin) {
  const std::string_view text(begin.data(), begin.size());
  if (text.starts_with(hello_magic) && text.size() > hello_purpose)
    from.use = static_cast<Use>(text[hello_purpose]);
  else if (text.starts_with(store_protocol::store_magic))
    from.use = Use::store, from.sent_messages = handshake_messages;
  if (from.use == Use::unknown || !to) return;
  to->use = from.use;
  to->sent_messages = from.sent_messages;
  ++traffic(from.process).connections[static_cast<std::size_t>(from.use)];
  ++traffic(to->process).connections[static_cast<std::size_t>(from.use)];
}

ssize_t Network::send(int fd, std::span<const iovec> pieces) {
  auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  if (socket->state == Socket::State::connecting) return -EAGAIN;
  if (socket->error != 0) return -std::exchange(socket->error, 0);
  if (socket->state != Socket::State::connected) return -ENOTCONN;
  if (socket->has_shut || socket->was_reset) return -EPIPE;
  auto* const to = static_cast<Socket*>(file(socket->peer));
  std::size_t room = to && to->inbox ? window_bytes - std::min(window_bytes, to->inbox->queued) : window_bytes;
  std::string bytes;
  for (const iovec& piece : pieces) {
    const std::size_t taken = std::min(piece.iov_len, room);
    bytes.append(static_cast<const char*>(piece.iov_base), taken);
    room -= taken;
  }
  if (bytes.empty()) return room == 0 ? -EAGAIN : 0;
  if (socket->use == Use::unknown) learn_use(*socket, to, bytes);
  Traffic& sent = traffic(socket->process);
  if (socket->sent_messages < handshake_messages) {
    ++socket->sent_messages;
    ++sent.handshakes;
  } else {
    ++sent.messages[static_cast<std::size_t>(socket->use)];
    sent.bytes[static_cast<std::size_t>(socket->use)] += bytes.size();
    if (socket->use == Use::store && bytes[store_protocol::store_magic.size()] == store_protocol::op_set)
      ++sent.store_sets;
  }
  const auto size = static_cast<ssize_t>(bytes.size());
  if (!to) {
    scheduler().at(scheduler().now() + 2 * paths_.latency, reset, static_cast<std::uint64_t>(fd));
    return size;
  }
  if (is_silent(to->process) && socket->user_timeout_ms > 0)
    scheduler().at(scheduler().now() + socket->user_timeout_ms * millisecond, expire, static_cast<std::uint64_t>(fd));
  if (bytes.size() > 1 && scheduler().below(1000) < paths_.split_of_1000) {
    const std::size_t first = 1 + scheduler().below(bytes.size() - 1);
    enqueue(*to, arrival(*to), bytes.substr(0, first), 0);
    bytes.erase(0, first);
  }
  enqueue(*to, arrival(*to), std::move(bytes), 0);
  return size;
}

ssize_t Network::receive(int fd, std::span<const iovec> pieces, bool peeks) {
  auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  if (socket->unread() == 0) {
    if (socket->error != 0) return -std::exchange(socket->error, 0);
    if (socket->has_ended) return 0;
    return socket->state == Socket::State::fresh ? -ENOTCONN : -EAGAIN;
  }
  auto& inbox = *socket->inbox;
  const bool was_full = inbox.queued >= window_bytes;
  std::size_t done = 0;
  for (const iovec& piece : pieces) {
    const std::size_t bytes = std::min(piece.iov_len, socket->unread() - done);
    std::memcpy(piece.iov_base, inbox.bytes.data() + inbox.taken + done, bytes);
    done += bytes;
  }
  if (peeks) return static_cast<ssize_t>(done);
  inbox.taken += done;
  inbox.queued -= done;
  if (inbox.queued == 0 && inbox.on_the_way.empty()) socket->inbox.reset();
  File* const peer = file(socket->peer);
  if (was_full && peer) notify(*peer);
  return static_cast<ssize_t>(done);
}

int Network::shutdown(int fd) {
  auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  if (socket->state != Socket::State::connected) return -ENOTCONN;
  auto* const to = static_cast<Socket*>(file(socket->peer));
  if (!std::exchange(socket->has_shut, true) && to) enqueue(*to, arrival(*to), "", -1);
  socket->has_ended = true;
  notify(*socket);
  return 0;
}

int Network::name(int fd, bool of_peer, sockaddr_in& address) {
  address = {};
  address.sin_family = AF_INET;
  if (const auto* const listener = dynamic_cast<const Listener*>(file(fd))) {
    if (of_peer) return -ENOTCONN;
    address.sin_addr.s_addr = listener->address;
    address.sin_port = htons(listener->port);
    return 0;
  }
  const auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  if (of_peer && socket->state != Socket::State::connected) return -ENOTCONN;
  address.sin_addr.s_addr = of_peer ? socket->remote_address : socket->local_address;
  address.sin_port = htons(of_peer ? socket->remote_port : socket->local_port);
  return 0;
}

int Network::get_option(int fd, int level, int option, void* value, socklen_t& length) {
  auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  const auto answer = [&](const auto& what) {
    length = std::min<socklen_t>(length, sizeof what);
    std::memcpy(value, &what, length);
    return 0;
  };
  if (level == SOL_SOCKET && option == SO_ERROR) return answer(std::exchange(socket->error, 0));
  if (level == IPPROTO_TCP && option == TCP_INFO) {
    tcp_info info{};
    info.tcpi_min_rtt = info.tcpi_rtt = static_cast<std::uint32_t>(2 * paths_.latency / microsecond);
    const File* const to = file(socket->peer);
    info.tcpi_unacked = unsent_bytes(fd) > 0 ? 1 : 0;
    info.tcpi_retransmits = info.tcpi_unacked > 0 && to && is_silent(to->process) ? 1 : 0;
    return answer(info);
  }
  if (level == IPPROTO_TCP && option == TCP_CONGESTION) return answer(std::array<char, 6>{"cubic"});
  return answer(0);
}

int Network::set_option(int fd, int level, int option, const void* value) {
  if (!file(fd)) return -EBADF;
  if (level == SOL_SOCKET && option == SO_BINDTODEVICE) return -EPERM;
  auto* const socket = dynamic_cast<Socket*>(file(fd));
  if (socket && level == SOL_SOCKET && option == SO_RCVLOWAT)
    std::memcpy(&socket->low_water, value, sizeof socket->low_water);
  if (socket && level == IPPROTO_TCP && option == TCP_USER_TIMEOUT)
    std::memcpy(&socket->user_timeout_ms, value, sizeof socket->user_timeout_ms);
  return 0;
}

int Network::unsent_bytes(int fd) {
  const auto* const socket = find<Socket>(fd);
  if (!socket) return -EBADF;
  const auto* const to = static_cast<const Socket*>(file(socket->peer));
  return to && to->inbox ? static_cast<int>(to->inbox->queued - to->unread()) : 0;
}

// --- events and timers ---

int Network::open_event(std::uint64_t count) {
  auto made = std::make_unique<Event>();
  made->count = count;
  return add(std::move(made));
}

int Network::open_timer() { return add(std::make_unique<Timer>()); }

int Network::set_timer(int fd, Time at) {
  auto* const timer = find<Timer>(fd);
  if (!timer) return -EBADF;
  timer->has_rung = false;
  timer->at = at;
  if (at >= timer->looks_at) return 0;
  timer->looks_at = at;
  scheduler().at(std::max(at, scheduler().now()), ring, static_cast<std::uint64_t>(fd));
  return 0;
}

void Network::ring(std::uint64_t fd) {
  auto* const timer = static_cast<Timer*>(the_network->file(static_cast<int>(fd)));
  if (!timer) return;
  timer->looks_at = never;
  if (timer->at == never) return;
  if (timer->at > scheduler().now()) {
    timer->looks_at = timer->at;
    return scheduler().at(timer->at, ring, fd);
  }
  timer->at = never;
  timer->has_rung = true;
  the_network->notify(*timer);
}

ssize_t Network::read_count(int fd, std::uint64_t& count) {
  if (auto* const timer = dynamic_cast<Timer*>(file(fd))) {
    if (!std::exchange(timer->has_rung, false)) return -EAGAIN;
    count = 1;
    return sizeof count;
  }
  auto* const event = find<Event>(fd);
  if (!event) return -EBADF;
  if (event->count == 0) return -EAGAIN;
  count = std::exchange(event->count, 0);
  return sizeof count;
}

ssize_t Network::add_count(int fd, std::uint64_t count) {
  auto* const event = find<Event>(fd);
  if (!event) return -EBADF;
  event->count += count;
  notify(*event);
  return sizeof count;
}

// --- waiting ---

int Network::open_epoll() { return add(std::make_unique<Epoll>()); }

int Network::control_epoll(int epoll, int operation, int fd, const epoll_event* event) {
  File* const watched = file(fd);
  if (!find<Epoll>(epoll) || !watched) return -EBADF;
  if (operation == EPOLL_CTL_DEL) {
    if (std::exchange(watched->epoll, -1) != epoll) return -ENOENT;
    return 0;
  }
  if (operation == EPOLL_CTL_ADD && watched->epoll == epoll) return -EEXIST;
  watched->epoll = epoll;
  watched->epoll_data = event->data.u64;
  watched->epoll_events = event->events;
  watched->is_listed = false;
  notify(*watched);
  return 0;
}

int Network::wait_epoll(int fd, std::span<epoll_event> events, Time until) {
  auto* const epoll = find<Epoll>(fd);
  if (!epoll) return -EBADF;
  pollfd own{fd, POLLIN, 0};
  if (until > scheduler().now() && poll({&own, 1}, until) == 0) return 0;
  std::vector<int> still;
  std::size_t count = 0;
  while (count < events.size() && (epoll->ready() & POLLIN) != 0) {
    File& first = *file(epoll->listed.back());
    events[count++] = {.events = first.epoll_ready(), .data = {.u64 = first.epoll_data}};
    still.push_back(first.number);
    epoll->listed.pop_back();
  }
  epoll->listed.insert(epoll->listed.begin(), still.begin(), still.end());
  return static_cast<int>(count);
}

int Network::poll(std::span<pollfd> fds, Time until) {
  const bool is_look = until <= scheduler().now();
  while (true) {
    int count = 0;
    for (pollfd& entry : fds) {
      entry.revents = 0;
      if (entry.fd < 0) continue;
      File* const found = file(entry.fd);
      if (!found) ++misuses_;
      entry.revents = found ? static_cast<short>(found->ready() & (entry.events | POLLERR | POLLHUP)) : POLLNVAL;
      if (entry.revents != 0) ++count;
    }
    if (count > 0) return count;
    if (is_look) {
      scheduler().block(scheduler().now() + spin);
      return 0;
    }
    if (scheduler().now() >= until) return 0;
    for (const pollfd& entry : fds)
      if (entry.fd >= 0) file(entry.fd)->add_waiter(*current_fiber(), entry.events);
    scheduler().block(until);
  }
}

// --- ends ---

void Network::close_now(File& closed) {
  const int fd = closed.number;
  if (auto* const listener = dynamic_cast<Listener*>(&closed)) {
    listeners_.erase(listener->at);
    for (const int waiting : listener->queue)
      if (File* const never_accepted = file(waiting)) close_now(*never_accepted);
  }
  if (auto* const socket = dynamic_cast<Socket*>(&closed)) {
    auto* const to = static_cast<Socket*>(file(socket->peer));
    // Who closes without having read all resets the connection.
    const bool resets = socket->inbox && socket->inbox->queued > 0;
    if (to && resets)
      enqueue(*to, arrival(*to), "", ECONNRESET);
    else if (to && !socket->has_shut)
      enqueue(*to, arrival(*to), "", -1);
  }
  --traffic(closed.process).descriptors;
  files_[static_cast<std::size_t>(fd - first_descriptor)].reset();
}

int Network::close(int fd) {
  File* const found = file(fd);
  if (!found || found->process != own_process()) {
    ++misuses_;
    return -EBADF;
  }
  close_now(*found);
  return 0;
}

void Network::end_process(int process, bool silently) {
  if (silently) silent_.insert(process);
  for (std::size_t index = 0; index < files_.size(); ++index) {
    if (!files_[index] || files_[index]->process != process) continue;
    if (!silently) {
      close_now(*files_[index]);
      continue;
    }
    const auto* const socket = dynamic_cast<const Socket*>(files_[index].get());
    const auto* const to = socket ? static_cast<const Socket*>(file(socket->peer)) : nullptr;
    if (!to) continue;
    const Time until =
        to->user_timeout_ms > 0 ? first_probe_after + to->user_timeout_ms * millisecond : keeps_alive_for;
    scheduler().at(scheduler().now() + until, expire, static_cast<std::uint64_t>(to->number));
  }
}

}  // namespace holmes::sim
