#include "holmes/bootstrap/store.hpp"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <vector>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/core/interrupt.hpp"

namespace holmes {
namespace {

class LocalStore final : public Store {
public:
  void set(const std::string& key, const std::string& value) override {
    {
      const std::lock_guard lock(mutex_);
      values_[key] = value;
    }
    changed_.notify_all();
  }

  std::string get(const std::string& key, Duration timeout) override {
    std::unique_lock lock(mutex_);
    wait_for_key(lock, key, timeout);
    return values_.at(key);
  }

  void wait(const std::string& key, Duration timeout) override {
    std::unique_lock lock(mutex_);
    wait_for_key(lock, key, timeout);
  }

  void remove(std::span<const std::string> keys) override {
    const std::lock_guard lock(mutex_);
    for (const std::string& key : keys) values_.erase(key);
  }

private:
  void wait_for_key(std::unique_lock<std::mutex>& lock, const std::string& key, Duration timeout) {
    const auto deadline = Clock::now() + timeout;
    while (true) {
      const auto until = std::min(deadline, SignalTimer().due().value_or(deadline));
      if (changed_.wait_until(lock, until, [&] { return values_.contains(key); })) return;
      if (Clock::now() >= deadline) throw store_timeout(key, timeout);
      lock.unlock();
      check_signals();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace

void remove_if_possible(Store& store, std::span<const std::string> keys) {
  try {
    store.remove(keys);
  } catch (const HolmesError&) {  // who needs the store next is told
  }
}

TimeoutError store_timeout(const std::string& key, Duration timeout) {
  return TimeoutError("nobody set the store key '" + key + "' within " + seconds_text(timeout) +
                      "; check that every rank was started and uses the same store");
}

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> base)
    : prefix_(std::move(prefix)), base_(std::move(base)) {
  if (base_ == nullptr) throw UsageError("PrefixStore needs a store to put the prefix '" + prefix_ + "' on");
}

void PrefixStore::set(const std::string& key, const std::string& value) { base_->set(prefix_ + "/" + key, value); }

std::string PrefixStore::get(const std::string& key, Duration timeout) {
  return base_->get(prefix_ + "/" + key, timeout);
}

void PrefixStore::wait(const std::string& key, Duration timeout) { base_->wait(prefix_ + "/" + key, timeout); }

void PrefixStore::remove(std::span<const std::string> keys) {
  std::vector<std::string> whole;
  for (const std::string& key : keys) whole.push_back(prefix_ + "/" + key);
  base_->remove(whole);
}

std::shared_ptr<Store> PrefixStore::another_client() {
  auto base = base_->another_client();
  return base ? std::make_shared<PrefixStore>(prefix_, std::move(base)) : nullptr;
}

std::shared_ptr<Store> make_local_store() { return std::make_shared<LocalStore>(); }

}  // namespace holmes
