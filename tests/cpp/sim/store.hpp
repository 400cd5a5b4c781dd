// A Store without sockets, for more ranks than a TcpStore serves: a request takes a round trip, and is counted.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "holmes/bootstrap/store.hpp"
#include "sim/network.hpp"

namespace holmes::sim {

// What all clients see.
struct StoredValues {
  std::map<std::string, std::string> values;
  std::map<std::string, std::vector<Fiber*>> waiting;
};

class SimulatedStore final : public Store {
public:
  SimulatedStore(std::shared_ptr<StoredValues> stored, Time round_trip)
      : stored_(std::move(stored)), round_trip_(round_trip) {}

  void set(const std::string& key, const std::string& value) override {
    begin();
    ++network().traffic(current_fiber()->process->number).store_sets;
    stored_->values[key] = value;
    const auto waiting = stored_->waiting.extract(key);
    if (waiting)
      for (Fiber* const fiber : waiting.mapped()) scheduler().wake(*fiber);
  }
  std::string get(const std::string& key, Duration timeout) override {
    wait(key, timeout);
    return stored_->values.at(key);
  }
  void wait(const std::string& key, Duration timeout) override {
    begin();
    const Time until = scheduler().now() + std::max<Time>(timeout.count(), 0);
    while (!stored_->values.contains(key)) {
      if (scheduler().now() >= until) throw store_timeout(key, timeout);
      stored_->waiting[key].push_back(current_fiber());
      if (!scheduler().block(until)) std::erase(stored_->waiting[key], current_fiber());
    }
  }
  std::size_t remove(std::span<const std::string> keys) override {
    begin();
    std::size_t removed = 0;
    for (const std::string& key : keys) removed += stored_->values.erase(key);
    return removed;
  }

private:
  void begin() const {
    ++network().traffic(current_fiber()->process->number).messages[static_cast<std::size_t>(Use::store)];
    scheduler().block(scheduler().now() + round_trip_);
  }

  std::shared_ptr<StoredValues> stored_;
  Time round_trip_;
};

}  // namespace holmes::sim
