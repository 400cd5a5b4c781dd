#include "holmes/p2p/p2p.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

constexpr std::uint32_t message_magic = 0x484c4d32;  // "HLM2"
// Copying so much costs less than a system call.
constexpr std::size_t read_ahead_bytes = 8 * 1024;
// What is sent is looked after before another message is read: its receiver may be through with what it was shown.
constexpr std::size_t long_message_bytes = 128 * 1024;

}  // namespace

P2pEngine::P2pEngine(Group& group, std::vector<std::unique_ptr<Channel>> channels, int wake_fd)
    : group_(group),
      channels_(std::move(channels)),
      peers_(static_cast<std::size_t>(group.size)),
      wake_fd_(wake_fd),
      max_unexpected_bytes_(Env::read().unexpected_bytes) {}

void P2pEngine::activate(int peer) {
  const auto at = std::ranges::lower_bound(active_, peer);
  if (at == active_.end() || *at != peer) active_.insert(at, peer);
}

void P2pEngine::submit(Request request) {
  if (taken_out_.capacity() <= pending_) taken_out_.reserve(2 * pending_ + 1);
  request.work->mark_running();
  ++pending_;
  if (request.is_send) {
    const Header header{message_magic, request.tag, request.buffer.bytes(), request.buffer.dtype, {}};
    Peer& state = peers_[*request.peer];
    std::unique_ptr<cuda::StagedSend> staged;
    Begun direct = request.buffer.device ? direct_for(*request.peer, request, header.bytes) : nullptr;
    if (request.buffer.device && !direct)
      staged = std::make_unique<cuda::StagedSend>(ring(state.send_rings, *request.buffer.device), request.buffer,
                                                  request.begin);
    activate(*request.peer);
    state.sends.push_back({std::move(request), header, 0, std::move(staged), std::move(direct)});
    return;
  }
  // A message may be waiting for it.
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank || (request.peer && *request.peer != peer)) continue;
    for (auto it = peers_[peer].unexpected.begin(); it != peers_[peer].unexpected.end(); ++it) {
      if (it->header.tag != request.tag) continue;
      Unexpected message = std::move(*it);
      peers_[peer].unexpected.erase(it);
      unexpected_bytes_ -= held_bytes(message.header);
      check_sizes(request, peer, message.header);
      if (request.buffer.device) {
        auto staged = stage_recv(peer, request);
        activate(peer);
        Landing& landing = peers_[peer].landing.emplace_back();
        landing.request = std::move(request);
        landing.staged = std::move(staged);
        landing.payload = std::move(message.payload);
        return;
      }
      std::copy(message.payload.begin(), message.payload.end(), request.buffer.begin());
      finish(request, peer, message.payload.size());
      return;
    }
    // Or be arriving, taken up on behalf of another receive.
    Peer& state = peers_[peer];
    if (state.header_bytes == sizeof(Header) && !state.target && state.header.tag == request.tag) {
      check_sizes(request, peer, state.header);
      unexpected_bytes_ -= held_bytes(state.header);
      state.target = std::move(request);
      if (state.target->buffer.device) return;  // lands when all of it is here
      std::copy_n(state.stray.begin(), state.payload_bytes, state.target->buffer.begin());
      state.stray = {};
      return;
    }
  }
  if (request.peer) {
    if (request.tag == internal_tag) ++watches_;
    activate(*request.peer);
    peers_[*request.peer].receives.push_back(std::move(request));
  } else {
    for (int peer = 0; peer < group_.size; ++peer)
      if (peer != group_.rank) activate(peer);
    any_receives_.push_back(std::move(request));
  }
}

ShortState P2pEngine::state_of(const ShortMessage& message) {
  const Peer& state = peers_[message.peer];
  Channel& channel = *channels_[message.peer];
  if (message.is_send) {
    const bool has_room = state.sends.empty() && channel.short_room_bytes() >= sizeof(Header) + message.bytes;
    return has_room ? ShortState::ready : ShortState::barred;
  }
  if (pending_ > 0 || !state.unexpected.empty() || state.is_arriving()) return ShortState::barred;
  const auto [came, is_elsewhere] = view(message.peer, sizeof(Header) + message.bytes);
  if (came.size() >= sizeof(Header)) {
    Header header;
    std::memcpy(&header, came.data(), sizeof header);
    const bool is_it = header.magic == message_magic && header.tag == message.tag && header.dtype == message.dtype &&
                       header.bytes == message.bytes;
    if (!is_it) return ShortState::barred;
    if (came.size() >= sizeof(Header) + message.bytes) return ShortState::ready;
  }
  return is_elsewhere || state.ahead_bytes() > 0 ? ShortState::barred : ShortState::awaited;
}

bool P2pEngine::carry(const ShortMessage& message, Clock::time_point deadline) {
  Channel& channel = *channels_[message.peer];
  Peer& state = peers_[message.peer];
  if (message.is_send) {
    Header header{message_magic, message.tag, message.bytes, message.dtype, {}};
    const std::array pieces{iovec{&header, sizeof header}, iovec{message.data, message.bytes}};
    const std::size_t gone = channel.send_short({pieces.data(), message.bytes > 0 ? pieces.size() : 1});
    if (gone == sizeof header + message.bytes) ++state.sent_messages;
    if (gone > 0 && gone < sizeof header + message.bytes) keep_rest(message, gone, deadline);
    return gone > 0;
  }
  const std::size_t bytes = sizeof(Header) + message.bytes;
  const std::byte* const came = view(message.peer, bytes).bytes.data();
  if (message.bytes > 0) std::memcpy(message.data, came + sizeof(Header), message.bytes);
  if (state.ahead_bytes() > 0)
    state.ahead_begin += bytes;
  else
    channel.consume(bytes);
  ++state.arrived_messages;
  return true;
}

// As a send that nobody waits for.
void P2pEngine::keep_rest(const ShortMessage& message, std::size_t gone_bytes, Clock::time_point deadline) {
  const auto* const begin = static_cast<const std::byte*>(message.data);
  auto copy = std::make_shared<std::vector<std::byte>>(begin, begin + message.bytes);
  Request rest;
  rest.buffer = {copy->data(), message.bytes / size_bytes(message.dtype), message.dtype, copy};
  rest.peer = message.peer;
  rest.tag = message.tag;
  rest.work = std::make_shared<Work>();
  rest.deadline = deadline;
  submit(std::move(rest));
  peers_[message.peer].sends.back().done_bytes = gone_bytes;
}

// What is there of the peer's stream, in one piece.
Channel::ShortView P2pEngine::view(int peer, std::size_t wanted) {
  const Peer& state = peers_[peer];
  if (state.ahead_bytes() == 0) return channels_[peer]->view_short(wanted);
  return {{state.ahead.data() + state.ahead_begin, state.ahead_bytes()}};
}

bool P2pEngine::advance() {
  if (pending_ == 0) return false;
  bool moved = false;
  // First what others wait for: what comes may take this rank a while.
  for (const int peer : active_) moved |= send_to(peer);
  for (const int peer : active_) {
    moved |= recv_or_end(peer);
    moved |= land(peer);
  }
  if (any_receives_.empty()) std::erase_if(active_, [this](int peer) { return peers_[peer].is_idle(); });
  return moved;
}

bool P2pEngine::send_to(int peer) {
  auto& sends = peers_[peer].sends;
  if (!sends.empty()) channels_[peer]->set_receives_meanwhile(receives_any());
  bool moved = false;
  while (!sends.empty()) {
    fill_sends(peers_[peer]);
    if (sends.front().direct) {
      if (!send_direct(peer)) return moved;
      moved = true;
      continue;
    }
    const Outgoing outgoing = collect(peer);
    const std::span pieces(outgoing.pieces.data(), outgoing.count);
    std::size_t bytes = 0;
    if (outgoing.is_staged)
      bytes = channels_[peer]->try_send_staged(pieces);
    else if (outgoing.is_lasting)
      bytes = channels_[peer]->try_send_lasting(pieces);
    else if (!pieces.empty())
      bytes = channels_[peer]->try_send(pieces);
    if (bytes == 0) return moved;
    moved = true;
    if (!went(peer, bytes)) return moved;
  }
  return moved;
}

bool P2pEngine::receives_any() const {
  const auto receives = [this](int peer) { return peers_[peer].is_arriving() || !peers_[peer].only_watches(); };
  return !any_receives_.empty() || std::ranges::any_of(active_, receives);
}

// What is to be sent next, several messages where they are short enough to be listed: their receiver gets them with one
// system call, or copies them without waiting for this side in between. Only the last piece may be lasting.
P2pEngine::Outgoing P2pEngine::collect(int peer) {
  Outgoing outgoing;
  for (Sending& sending : peers_[peer].sends) {
    if (outgoing.count + 2 > outgoing.pieces.size()) break;
    const std::size_t header_left = sizeof(Header) - std::min(sending.done_bytes, sizeof(Header));
    const std::size_t payload_done = sending.done_bytes + header_left - sizeof(Header);
    const std::size_t payload_left = sending.header.bytes - payload_done;
    const bool is_lasting = !sending.staged && payload_left >= channels_[peer]->lasting_bytes();
    if (outgoing.count > 0 && (is_lasting || sending.staged || sending.direct)) break;
    if (header_left > 0)
      outgoing.add({reinterpret_cast<std::byte*>(&sending.header) + sending.done_bytes, header_left});
    if (sending.staged) {
      if (const auto ready = sending.staged->ready(); !ready.empty()) {
        outgoing.add({const_cast<std::byte*>(ready.data()), ready.size()});
        outgoing.is_staged = channels_[peer]->lasting_bytes() < SIZE_MAX;
      }
      break;
    }
    if (payload_left > 0) outgoing.add({sending.request.buffer.begin() + payload_done, payload_left});
    outgoing.is_lasting = is_lasting;
    if (is_lasting) break;
  }
  return outgoing;
}

// So many bytes more are sent. Returns whether to go on: a message ended there, or the next of its slots may be ready.
bool P2pEngine::went(int peer, std::size_t bytes) {
  auto& sends = peers_[peer].sends;
  while (bytes > 0) {
    Sending& sending = sends.front();
    const std::size_t whole = sizeof(Header) + sending.header.bytes;
    const std::size_t header_left = sizeof(Header) - std::min(sending.done_bytes, sizeof(Header));
    const std::size_t of_it = std::min(bytes, whole - sending.done_bytes);
    bytes -= of_it;
    sending.done_bytes += of_it;
    if (sending.staged && of_it > header_left) sending.staged->sent(of_it - header_left);
    if (sending.done_bytes < whole) return sending.staged != nullptr;
    ++peers_[peer].sent_messages;
    finish(sending.request);
    sends.pop_front();
  }
  return true;
}

bool P2pEngine::awaits_recv(int peer) const {
  const Peer& state = peers_[peer];
  if (state.ended) return state.is_arriving() || !state.only_watches();
  return state.is_arriving() || !state.receives.empty() || !any_receives_.empty();
}

std::size_t P2pEngine::awaited_recv_bytes(int peer) const {
  const Peer& state = peers_[peer];
  if (!awaits_recv(peer)) return 0;
  if (state.header_bytes < sizeof(Header)) return 1;
  std::size_t left = state.header.bytes - state.payload_bytes;
  if (state.staged) left = state.staged->space_bytes();
  if (state.direct && !state.direct->load()) return 0;  // until it has begun
  if (left == 0) return 0;                              // until a slot is free
  return std::max<std::size_t>(left - std::min(left, state.ahead_bytes()), 1);
}

std::size_t P2pEngine::awaited_send_bytes(int peer) const {
  if (peers_[peer].sends.empty()) return 0;
  const Sending& sending = peers_[peer].sends.front();
  const std::size_t left = sizeof(Header) + sending.header.bytes - sending.done_bytes;
  if (sending.direct && sending.done_bytes >= sizeof(Header) && !sending.direct->load()) return 0;
  if (!sending.staged) return left;
  return sizeof(Header) - std::min(sending.done_bytes, sizeof(Header)) + sending.staged->ready().size();
}

bool P2pEngine::needs(int peer, bool left_in_order) const {
  const Peer& state = peers_[peer];
  if (state.is_arriving() || !state.sends.empty()) return true;
  if (left_in_order ? !state.only_watches() : !state.receives.empty()) return true;
  if (any_receives_.empty()) return false;
  const auto is_open = [this](int other) { return other != group_.rank && !peers_[other].ended; };
  for (int other = 0; other < group_.size && left_in_order; ++other)
    if (other != peer && is_open(other)) return false;
  return true;
}

bool P2pEngine::recv_or_end(int peer) {
  try {
    return recv_from(peer);
  } catch (const StreamClosed& closed) {
    const bool is_broken = closed.system_errno != 0 && any_receives_.empty();  // a watch has to tell
    if (is_broken || needs(peer, true)) throw;
    peers_[peer].ended = true;
    return false;
  }
}

// The next bytes of the peer's stream. A small read takes along what follows it: a header and its small message cost
// one system call. `is_lasting`: `into` stays until it has come.
std::size_t P2pEngine::read(int peer, std::byte* into, std::size_t bytes, bool is_lasting) {
  Peer& state = peers_[peer];
  if (state.ahead_bytes() > 0) {
    bytes = std::min(bytes, state.ahead_bytes());
    std::memcpy(into, state.ahead.data() + state.ahead_begin, bytes);
    state.ahead_begin += bytes;
    return bytes;
  }
  if (bytes >= read_ahead_bytes) {
    const iovec piece{into, bytes};
    return is_lasting ? channels_[peer]->try_recv_lasting(piece) : channels_[peer]->try_recv({&piece, 1});
  }
  state.ahead.resize(read_ahead_bytes);
  const iovec pieces[] = {{into, bytes}, {state.ahead.data(), read_ahead_bytes}};
  const std::size_t received = channels_[peer]->try_recv(pieces);
  state.ahead_begin = 0;
  state.ahead_end = received - std::min(received, bytes);
  return std::min(received, bytes);
}

bool P2pEngine::recv_from(int peer) {
  Peer& state = peers_[peer];
  bool moved = false;
  while (awaits_recv(peer)) {
    if (state.header_bytes < sizeof(Header)) {
      const std::size_t bytes = read(peer, reinterpret_cast<std::byte*>(&state.header) + state.header_bytes,
                                     sizeof(Header) - state.header_bytes, false);
      if (bytes == 0) return moved;
      moved = true;
      state.header_bytes += bytes;
      if (state.header_bytes < sizeof(Header)) continue;
      match(peer);
    }
    while (state.direct && state.payload_bytes < state.header.bytes) {
      const std::size_t bytes = recv_direct(peer);
      if (bytes == 0 && state.direct) return moved;
      moved = true;
    }
    if (state.payload_bytes < state.header.bytes) {
      const std::span<std::byte> space = next_space(state);
      const bool is_lasting = state.staged || (state.target && !state.target->buffer.device);
      const std::size_t bytes = space.empty() ? 0 : read(peer, space.data(), space.size(), is_lasting);
      if (bytes == 0) return moved;
      moved = true;
      state.payload_bytes += bytes;
      if (state.staged) state.staged->received(bytes);
      if (state.payload_bytes < state.header.bytes) {
        if (state.staged) continue;  // in the next slot
        return moved;
      }
    }
    const bool was_long = state.payload_bytes >= long_message_bytes;
    ++state.arrived_messages;
    end_message(peer);
    if (was_long) return moved;
  }
  return moved;
}

std::span<std::byte> P2pEngine::next_space(Peer& state) const {
  if (state.staged) return state.staged->space();
  const bool is_direct = state.target && !state.target->buffer.device;
  std::byte* begin = is_direct ? state.target->buffer.begin() : state.stray.data();
  return {begin + state.payload_bytes, state.header.bytes - state.payload_bytes};
}

// The whole message is here.
void P2pEngine::end_message(int peer) {
  Peer& state = peers_[peer];
  if (!state.target) {
    state.unexpected.push_back({state.header, std::move(state.stray)});
  } else if (state.target->buffer.device) {
    if (!state.staged && !state.direct) state.staged = stage_recv(peer, *state.target);
    Landing& landing = state.landing.emplace_back();  // it may throw, and then the target is still there
    landing.request = std::move(*state.target);
    landing.staged = std::move(state.staged);
    landing.payload = std::move(state.stray);
    landing.is_direct = state.has_direct_bytes;
  } else {
    finish(*state.target, peer, state.header.bytes);
  }
  state.target.reset();
  state.staged.reset();
  state.direct.reset();
  state.has_direct_bytes = false;
  state.stray = {};
  state.header_bytes = 0;
  state.payload_bytes = 0;
}

void P2pEngine::match(int peer) {
  Peer& state = peers_[peer];
  const ControlConnection& control = *group_.controls[peer];
  const ErrorContext context{.rank = group_.label(group_.rank),
                             .peer = group_.label(peer),
                             .host = control.host(),
                             .nic = control.nic(),
                             .system_errno = {}};
  if (state.header.magic != message_magic)
    throw ProtocolError("communicator '" + group_.name + "': the stream of " + control.describe() +
                            " does not hold a message where one is due; all processes must run the same version",
                        context);
  const auto take = [&](std::list<Request>& receives) {
    const auto it = std::find_if(receives.begin(), receives.end(),
                                 [&](const Request& request) { return request.tag == state.header.tag; });
    if (it == receives.end()) return false;
    check_sizes(*it, peer, state.header);
    state.target = std::move(*it);
    receives.erase(it);
    if (state.target->buffer.device) state.direct = direct_for(peer, *state.target, state.header.bytes);
    if (state.target->buffer.device && !state.direct) state.staged = stage_recv(peer, *state.target);
    return true;
  };
  if (take(state.receives) || take(any_receives_)) return;
  // unexpected_bytes_ never is above the limit.
  if (held_bytes(state.header) > max_unexpected_bytes_ - unexpected_bytes_)
    throw MismatchError(
        "communicator '" + group_.name + "': " + control.describe() + " sent " + std::to_string(state.header.bytes) +
            " bytes with tag " + std::to_string(state.header.tag) + ", for which rank " +
            std::to_string(group_.label(group_.rank)) + " has posted no receive, and " +
            std::to_string(unexpected_bytes_) + " bytes of such messages wait already (" +
            std::to_string(max_unexpected_bytes_) +
            " bytes are kept); post receives in the order of the sends, or raise HOLMES_UNEXPECTED_BYTES",
        context);
  state.stray.resize(state.header.bytes);
  unexpected_bytes_ += held_bytes(state.header);
}

// Empty messages take memory too.
std::uint64_t P2pEngine::held_bytes(const Header& header) {
  constexpr std::uint64_t least_bytes = 128;
  return std::max(header.bytes, least_bytes);
}

void P2pEngine::check_sizes(const Request& request, int peer, const Header& header) const {
  const std::size_t most_bytes = request.buffer.bytes();
  const bool takes_less = request.received_bytes != nullptr;
  const bool fits = takes_less ? header.bytes <= most_bytes : header.bytes == most_bytes;
  if (fits && header.dtype == request.buffer.dtype) return;
  const ControlConnection& control = *group_.controls[peer];
  const auto describe = [](std::uint64_t bytes, DType dtype) {
    const bool known = static_cast<int>(dtype) < dtype_count;
    return std::to_string(bytes) + " bytes of " + (known ? std::string(name(dtype)) : "an unknown dtype");
  };
  throw MismatchError("communicator '" + group_.name + "': " + control.describe() + " sent " +
                          describe(header.bytes, header.dtype) + " with tag " + std::to_string(header.tag) +
                          ", but the receive of rank " + std::to_string(group_.label(group_.rank)) + " takes " +
                          (takes_less ? "at most " : "") + describe(most_bytes, request.buffer.dtype) +
                          (takes_less ? "; give it a larger buffer, of the send's dtype"
                                      : "; dtype and count of a send and its receive must be equal"),
                      {.rank = group_.label(group_.rank),
                       .peer = group_.label(peer),
                       .host = control.host(),
                       .nic = control.nic(),
                       .system_errno = {}});
}

void P2pEngine::finish(Request& request, int source, std::size_t bytes) {
  request.work->set_source_rank(request.told_source.value_or(source));
  if (request.received_bytes) *request.received_bytes = bytes;
  finish(request);
}

void P2pEngine::finish(Request& request) {
  --pending_;
  // What lasts is moved by the HCA, not here. Another thread may have called it since the clock was seen.
  const bool is_copied = !request.peer || request.buffer.bytes() < channels_[*request.peer]->lasting_bytes();
  const auto now = std::max(group_.clock.now(is_copied ? request.buffer.bytes() : 0), request.work->submitted());
  group_.recorder->finish(request.record, true, now);
  request.work->complete(now);
}

template <typename Visit>
void P2pEngine::for_each_pending(Visit visit) const {
  constexpr const cuda::StagedRecv* no_stage = nullptr;
  for (const int number : active_) {
    const Peer& peer = peers_[number];
    for (const Sending& sending : peer.sends) visit(sending.request, sending.done_bytes, sending.staged.get());
    if (peer.target) visit(*peer.target, peer.payload_bytes, peer.staged.get());
    for (const Landing& landing : peer.landing)
      visit(landing.request, landing.request.buffer.bytes(), landing.staged.get());
    for (const Request& request : peer.receives) visit(request, 0, no_stage);
  }
  for (const Request& request : any_receives_) visit(request, 0, no_stage);
}

RecordedCall P2pEngine::Request::recorded_call() const {
  return {.op = is_send ? OpCode::send : OpCode::recv,
          .dtype = buffer.dtype,
          .peer = peer,
          .sequence = sequence,
          .tag = tag,
          .count = buffer.count};
}

std::size_t P2pEngine::append_pending(std::vector<PendingOperation>& pending) const {
  std::size_t number = 0;
  for_each_pending([&](const Request& request, std::size_t done_bytes, const auto*) {
    if (request.tag == internal_tag) return;
    ++number;
    if (pending.size() >= max_pending) return;
    PendingOperation operation{
        request.record, request.recorded_call(), true, request.work->is_awaited(), request.work->submitted(), {}};
    if (request.peer) {
      PeerProgress progress{.peer = *request.peer, .is_heard = !request.is_send && done_bytes > 0};
      if (request.is_send) {
        progress.sent_bytes = done_bytes - std::min(done_bytes, sizeof(Header));
        progress.to_send_bytes = request.buffer.bytes();
      } else {
        progress.received_bytes = done_bytes;
        progress.to_receive_bytes = request.buffer.bytes();
      }
      operation.peers.push_back(progress);
    }
    pending.push_back(std::move(operation));
  });
  return number;
}

std::vector<std::shared_ptr<Work>> P2pEngine::take_pending() {
  std::vector<std::shared_ptr<Work>> works = std::move(taken_out_);
  const auto now = Clock::now();
  for_each_pending([&](const Request& request, std::size_t, const auto*) {
    group_.recorder->finish(request.record, false, now);
    works.push_back(request.work);
  });
  for (Peer& peer : peers_) peer.clear();
  active_.clear();
  any_receives_.clear();
  pending_ = 0;
  watches_ = 0;
  return works;
}

bool P2pEngine::Peer::only_watches() const {
  return std::ranges::all_of(receives, [](const Request& request) { return request.tag == internal_tag; });
}

void P2pEngine::Peer::clear() {
  sends.clear();
  receives.clear();
  unexpected.clear();
  ahead = {};
  ahead_begin = ahead_end = 0;
  target.reset();
  staged.reset();
  direct.reset();
  has_direct_bytes = false;
  stray = {};
  header_bytes = payload_bytes = 0;
  landing.clear();
  send_rings.clear();
  recv_rings.clear();
}

std::list<P2pEngine::Request> P2pEngine::take_watches(std::optional<int> peer) {
  std::list<Request> watches;
  for (int other = 0; other < group_.size && watches_ > 0; ++other) {
    if (peer && *peer != other) continue;
    auto& receives = peers_[other].receives;
    for (auto next = receives.begin(); next != receives.end();) {
      const auto one = next++;
      if (one->tag == internal_tag) watches.splice(watches.end(), receives, one);
    }
  }
  watches_ -= watches.size();
  pending_ -= watches.size();
  return watches;
}

std::optional<Clock::time_point> P2pEngine::next_deadline() const {
  std::optional<Clock::time_point> next;
  for_each_pending([&](const Request& request, std::size_t, const auto*) {
    if (!next || request.deadline < *next) next = request.deadline;
  });
  return next;
}

std::string P2pEngine::describe_overdue(Clock::time_point now) const {
  std::string text;
  for_each_pending([&](const Request& request, std::size_t done_bytes, const auto* staged) {
    if (request.deadline > now) return;
    const std::string what = (request.is_send ? "send of " : "recv of ") + std::to_string(request.buffer.bytes()) +
                             (request.is_send ? " bytes to " : " bytes from ");
    const std::string who = request.peer ? group_.controls[*request.peer]->describe() : "any rank";
    add_word(text,
             what + who + ", tag " + std::to_string(request.tag) + ": " + std::to_string(done_bytes) + " bytes moved" +
                 (staged ? staged->state_text() : ""),
             "; ");
  });
  return text;
}

}  // namespace holmes
