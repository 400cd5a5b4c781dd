#include "holmes/bootstrap/store.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/bootstrap/stored_values.hpp"
#include "holmes/core/interrupt.hpp"

namespace holmes {
namespace {

class LocalStore final : public AtomicStore {
public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_.set(key, value);
    changed_.notify_all();
  }

  std::string get(const std::string& key, Duration timeout) override {
    return multi_get(std::span(&key, 1), timeout).front();
  }

  void wait(const std::string& key, Duration timeout) override {
    std::unique_lock lock(mutex_);
    wait_for(lock, std::span(&key, 1), timeout);
  }

  std::size_t remove(std::span<const std::string> keys) override {
    const std::lock_guard lock(mutex_);
    return values_.remove(keys);
  }

  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
    return values_.add(key, amount);
  }

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
    return values_.compare_set(key, expected, desired);
  }

  bool check(std::span<const std::string> keys) override {
    const std::lock_guard lock(mutex_);
    return !values_.missing(keys);
  }

  std::vector<std::string> multi_get(std::span<const std::string> keys, Duration timeout) override {
    std::unique_lock lock(mutex_);
    wait_for(lock, keys, timeout);
    std::vector<std::string> found;
    for (const std::string& key : keys) found.push_back(*values_.find(key));
    return found;
  }

  std::size_t num_keys() override {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

private:
  void wait_for(std::unique_lock<std::mutex>& lock, std::span<const std::string> keys, Duration timeout) {
    const auto deadline = Clock::now() + timeout;
    while (true) {
      const auto until = std::min(deadline, SignalTimer().due().value_or(deadline));
      if (changed_.wait_until(lock, until, [&] { return !values_.missing(keys); })) return;
      if (Clock::now() >= deadline) throw store_timeout(*values_.missing(keys), timeout);
      lock.unlock();
      check_signals();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  StoredValues values_;
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

std::size_t PrefixStore::remove(std::span<const std::string> keys) {
  std::vector<std::string> whole;
  for (const std::string& key : keys) whole.push_back(prefix_ + "/" + key);
  return base_->remove(whole);
}

std::shared_ptr<Store> PrefixStore::another_client() {
  auto base = base_->another_client();
  return base ? std::make_shared<PrefixStore>(prefix_, std::move(base)) : nullptr;
}

std::shared_ptr<AtomicStore> make_local_store() { return std::make_shared<LocalStore>(); }

}  // namespace holmes
