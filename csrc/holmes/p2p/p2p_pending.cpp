// What is pending in a P2pEngine: its deadlines, its description, its end.
#include "holmes/p2p/p2p.hpp"

#include <algorithm>

namespace holmes {

template <typename Visit>
void P2pEngine::for_each_pending(Visit visit) const {
  constexpr const cuda::StagedRecv* no_stage = nullptr;
  for (const Peer& peer : peers_) {
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
  std::vector<std::shared_ptr<Work>> works;
  const auto now = Clock::now();
  for_each_pending([&](const Request& request, std::size_t, const auto*) {
    group_.recorder->finish(request.record, false, now);
    works.push_back(request.work);
  });
  for (Peer& peer : peers_) peer = {};
  any_receives_.clear();
  pending_ = 0;
  watches_ = 0;
  return works;
}

bool P2pEngine::Peer::only_watches() const {
  return std::ranges::all_of(receives, [](const Request& request) { return request.tag == internal_tag; });
}

std::vector<std::shared_ptr<Work>> P2pEngine::take_watches(std::optional<int> peer) {
  std::vector<std::shared_ptr<Work>> works;
  for (int other = 0; other < group_.size && watches_ > 0; ++other) {
    if (peer && *peer != other) continue;
    std::erase_if(peers_[other].receives, [&](const Request& request) {
      if (request.tag != internal_tag) return false;
      works.push_back(request.work);
      return true;
    });
  }
  watches_ -= works.size();
  pending_ -= works.size();
  return works;
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
    text += (text.empty() ? "" : "; ") + std::string(request.is_send ? "send of " : "recv of ") +
            std::to_string(request.buffer.bytes()) + (request.is_send ? " bytes to " : " bytes from ") +
            (request.peer ? group_.controls[*request.peer]->describe() : std::string("any rank")) + ", tag " +
            std::to_string(request.tag) + ": " + std::to_string(done_bytes) + " bytes moved" +
            (staged ? staged->state_text() : "");
  });
  return text;
}

}  // namespace holmes
