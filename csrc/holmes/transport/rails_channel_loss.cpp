// How a RailsChannel notices that a rail is lost, and what it does then.
#include <algorithm>
#include <cerrno>

#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/transport/rails_channel.hpp"

namespace holmes {
namespace {

constexpr auto health_interval = std::chrono::milliseconds(100);
// Where one connection ended and others have not: how long to wait whether the whole stream ends.
constexpr auto end_grace = std::chrono::milliseconds(300);
constexpr auto shortest_pause = std::chrono::microseconds(500);
constexpr auto longest_pause = std::chrono::milliseconds(10);

}  // namespace

bool RailsChannel::has_living(const Rail* except) const {
  return std::any_of(rails_.begin(), rails_.end(),
                     [&](const auto& rail) { return rail.get() != except && rail->is_living(); });
}

void RailsChannel::throw_closed() const {
  int error = 0;
  for (const auto& rail : rails_)
    if (rail->error() != 0) error = rail->error();
  throw StreamClosed{peer(), error};
}

// Where rails were lost, the living ones may be dead too without telling.
bool RailsChannel::tells_end() const {
  const bool all_living = std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->is_living(); });
  return all_living || Clock::now() - received_at_ < context_->timeout;
}

void RailsChannel::take_care(Clock::time_point now) {
  for (const auto& rail : rails_) {
    rail->collect(now, pool_);
    rail->flush();
  }
  if (now >= health_check_at_) {
    health_check_at_ = now + health_interval;
    check_health(now);
  }
  send_again(now);
}

std::optional<Clock::time_point> RailsChannel::next_care() const {
  const bool is_stalled = !again_.empty() || std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) {
    return rail->is_living() && rail->has_unwritten();
  });
  const bool is_watching =
      awaits_recv_ || awaits_send_ || is_stalled ||
      std::any_of(rails_.begin(), rails_.end(),
                  [](const auto& rail) { return rail->is_living() && rail->outstanding_bytes() > 0; }) ||
      (has_living() && std::any_of(rails_.begin(), rails_.end(),
                                   [](const auto& rail) { return rail->state() == Rail::State::broken; }));
  if (!is_watching) return std::nullopt;
  const auto now = Clock::now();
  auto at = std::max(health_check_at_, now + shortest_pause);
  if (is_stalled) at = std::min<Clock::time_point>(at, now + longest_pause);
  if (!awaits_send_) return at;
  // Nothing tells when the peer has acknowledged enough for more.
  for (const auto& rail : rails_) {
    if (!rail->is_living() || rail->has_unwritten() || rail->outstanding_bytes() == 0) continue;
    const auto pause = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(rail->room_s()));
    at = std::min(at, now + std::clamp<Clock::duration>(pause, shortest_pause, longest_pause));
  }
  return at;
}

void RailsChannel::check_health(Clock::time_point now) {
  for (const auto& rail : rails_) {
    rail->check_connection(now);
    if (rail->state() == Rail::State::retired || !has_living(rail.get())) continue;
    if (rail->state() == Rail::State::broken) {
      const int error = rail->error();
      if (now - rail->broken_at() >= end_grace)
        retire(*rail, error != 0 ? errno_text(error) : "the connection was closed", true, now);
    } else if (rail->is_interface_down()) {
      retire(*rail, "the interface is down", true, now);
    } else if (rail->is_stuck(context_->timeout, now)) {
      const auto silent_s = std::chrono::duration<double>(context_->timeout).count();
      retire(*rail, "no acknowledgement for " + std::to_string(silent_s).substr(0, 4) + " s", true, now);
    }
  }
}

void RailsChannel::retire(Rail& rail, const std::string& reason, bool tell_peer, Clock::time_point now) {
  // Both sides may have lost another one: then each goes on sending on what it has.
  if (!has_living(&rail)) return;
  rail.collect(now, pool_);
  ChunkQueue lost = rail.retire();
  warn_of(rail, reason, lost.size());
  if (tell_peer) {
    Chunk notice{pool_.take(), assigned_position_};
    notice.frame->header.kind = FrameKind::retire;
    notice.frame->header.rail = static_cast<std::uint8_t>(rail.index());
    again_.push_back(std::move(notice));
  }
  while (!lost.empty()) again_.push_back(lost.pop_front());
  send_again(now);
}

void RailsChannel::send_again(Clock::time_point now) {
  while (!again_.empty()) {
    Rail* rail = choose_rail(again_[0].frame->header.bytes);
    if (!rail) return;
    rail->push(again_.pop_front(), now);
  }
}

void RailsChannel::warn_of(const Rail& rail, const std::string& reason, std::size_t chunks) const {
  const ConnectionInfo& info = rail.info();
  {
    std::lock_guard lock(context_->mutex);
    if (!context_->warned_of.emplace(peer(), info.interface).second) return;
  }
  std::string others;
  for (const auto& other : rails_)
    if (other->is_living()) others += (others.empty() ? "" : ", ") + other->info().interface;
  log(LogLevel::warn, context_->own_rank,
      "communicator '" + context_->communicator + "' lost the connection to rank " + std::to_string(peer()) +
          " (host " + info.host + ") over NIC " + info.interface + " (" + info.local_address + " -> " +
          info.remote_address + "): " + reason + "; it goes on over " + others + ", " + std::to_string(chunks) +
          " chunks are sent again. Make a new communicator to use the NIC again");
}

}  // namespace holmes
