#include "holmes/transport/uplink.hpp"

#include <algorithm>
#include <map>

#include "holmes/core/fork.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

constexpr std::chrono::milliseconds hear_interval{2};

// Of the process; a forked child has none of its parent's connections.
struct Uplinks {
  const std::uint64_t epoch = fork_epoch();
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Uplink>> by_interface;
};

}  // namespace

std::shared_ptr<Uplink> Uplink::of(const std::string& interface) {
  Uplinks& all = own_of_process<Uplinks>();
  const std::lock_guard lock(all.mutex);
  auto& known = all.by_interface[interface];
  auto uplink = known.lock();
  if (!uplink) known = uplink = std::make_shared<Uplink>();
  return uplink;
}

void Uplink::add(const PathPacer& pacer) {
  const std::lock_guard lock(mutex_);
  pacers_.push_back(&pacer);
}

void Uplink::remove(const PathPacer& pacer) {
  const std::lock_guard lock(mutex_);
  std::erase(pacers_, &pacer);
}

void Uplink::join(std::weak_ptr<UplinkNeighbours> neighbours, std::optional<int> priority, int rail) {
  const std::lock_guard lock(mutex_);
  std::erase_if(members_, [](const Member& member) { return member.neighbours.expired(); });
  members_.push_back({std::move(neighbours), priority, rail});
}

bool Uplink::has_neighbours(const Precedence& of) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(members_, [&](const Member& member) { return member.is_told(of); });
}

// Called without the lock: what they do may call back, and whoever is the last to hold one ends it.
Uplink::Members Uplink::members() const {
  const std::lock_guard lock(mutex_);
  Members found;
  for (const Member& member : members_)
    if (auto neighbours = member.neighbours.lock()) found.emplace_back(std::move(neighbours), member);
  return found;
}

void Uplink::tell(const Precedence& of, std::chrono::milliseconds for_so_long) const {
  where_memory_allows([&] {
    for (const auto& [neighbours, member] : members())
      if (member.is_told(of)) neighbours->tell({of, member.rail, for_so_long});
  });
}

void Uplink::begin_turn(const Precedence& of, Clock::time_point now) {
  {
    const std::lock_guard lock(mutex_);
    ++told(of).streams;
  }
  keep_turn(of, now);
}

void Uplink::keep_turn(const Precedence& of, Clock::time_point now) {
  {
    const std::lock_guard lock(mutex_);
    Told& told = this->told(of);
    if (now - told.at < renewal) return;
    told.at = now;
  }
  tell(of, lease);
}

void Uplink::end_turn(const Precedence& of) {
  {
    const std::lock_guard lock(mutex_);
    Told& told = this->told(of);
    if (--told.streams > 0) return;
    told.at = {};  // the next one is told at once
  }
  tell(of, {});
}

void Uplink::hear(Clock::time_point now) {
  {
    const std::lock_guard lock(mutex_);
    if (members_.empty() || now - heard_at_ < hear_interval) return;
    heard_at_ = now;
  }
  where_memory_allows([&] {
    for (const auto& [neighbours, member] : members()) neighbours->hear();
  });
}

void Uplink::heard(const void* source, const Turn& turn, Clock::time_point now) {
  const auto until = now + std::clamp<std::chrono::milliseconds>(turn.lease, std::chrono::milliseconds(0), lease);
  const std::lock_guard lock(mutex_);
  std::erase_if(leases_,
                [&](const Lease& one) { return one.until <= now || (one.source == source && one.of == turn.of); });
  if (until > now) leases_.push_back({source, turn.of, until});
}

void Uplink::tell(const Carried& carried) const {
  where_memory_allows([&] {
    Carried told = carried;
    for (const auto& [neighbours, member] : members()) {
      told.rail = member.rail;
      neighbours->tell(told);
    }
  });
}

void Uplink::heard(const Carried& carried, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  std::erase_if(carried_, [&](const auto& one) {
    return now - one.second > carried_memory || (one.first.teller == carried.teller && one.first.path == carried.path);
  });
  carried_.emplace_back(carried, now);
}

Beside Uplink::beside(std::uint64_t path, std::uint64_t teller, Clock::time_point now) const {
  Beside found;
  const std::lock_guard lock(mutex_);
  for (const auto& [carried, told_at] : carried_) {
    if (carried.path != path || carried.teller == teller) continue;
    if (now - told_at >= carried_memory) continue;
    found.one_may_tell |= carried.teller < teller && carried.is_limit;
    found.one_has_told |= carried.has_told;
    if (now - told_at >= carried_lease) continue;
    found.bytes_per_s += carried.bytes_per_s;
    ++found.processes;
  }
  return found;
}

bool Uplink::gives_way(const Precedence& own, Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(leases_, [&](const Lease& one) { return one.of.goes_before(own) && one.until > now; });
}

}  // namespace holmes
