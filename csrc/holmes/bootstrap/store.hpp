// Store: the rendezvous that bootstraps a communicator. Three methods, so that any key-value store will do.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "holmes/core/error.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

// How long to ask whether a key exists: a store has no other question for it.
inline constexpr Duration store_probe = std::chrono::milliseconds(10);

// Keys are text, values are bytes. Every method may be called from any thread; implementations lock.
class Store {
public:
  virtual ~Store() = default;
  // Sets `key`; overwrites.
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Returns the value of `key`, waiting until somebody sets it. Throws TimeoutError naming the key after `timeout`.
  virtual std::string get(const std::string& key, Duration timeout) = 0;
  // Waits until `key` exists. Throws TimeoutError naming the key after `timeout`.
  virtual void wait(const std::string& key, Duration timeout) = 0;
  // Removes those of `keys` that are there, where the store can, for who knows that nobody reads them any more. Returns
  // how many, as far as is known.
  virtual std::size_t remove(std::span<const std::string> /*keys*/) { return 0; }
  // A client of its own, for a thread of the library's, where the owner's calls hold up all others of one client; else
  // null.
  virtual std::shared_ptr<Store> another_client() { return nullptr; }
};

// A store with what agreements need besides, as torch's c10d stores have it. Each call takes effect at once, one after
// the other, for all who use the store.
class AtomicStore : public Store {
public:
  // Adds to the whole number that `key` holds in text (0 where nobody has set it); returns the sum. UsageError where it
  // holds none, or the sum has more than 64 bits.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
  // Sets `key` to `desired` where it holds `expected`, or where nobody has set it and `expected` is empty. Returns what
  // it holds then; `expected` where nobody has set it.
  virtual std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) = 0;
  // Whether all of `keys` are set.
  virtual bool check(std::span<const std::string> keys) = 0;
  // The values of all `keys`, waiting until all are set. Throws TimeoutError naming the first that is not.
  virtual std::vector<std::string> multi_get(std::span<const std::string> keys, Duration timeout) = 0;
  // How many keys are set.
  virtual std::size_t num_keys() = 0;
};

// A view of `base` in which every key gets `prefix` and a slash in front.
class PrefixStore final : public Store {
public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> base);
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Duration timeout) override;
  void wait(const std::string& key, Duration timeout) override;
  std::size_t remove(std::span<const std::string> keys) override;
  std::shared_ptr<Store> another_client() override;

private:
  std::string prefix_;
  std::shared_ptr<Store> base_;
};

// As Store::remove; a store that fails is as one that cannot.
void remove_if_possible(Store& store, std::span<const std::string> keys);

// The error every store throws where `key` was not set within `timeout`.
TimeoutError store_timeout(const std::string& key, Duration timeout);

// In memory, for ranks that are threads of one process.
std::shared_ptr<AtomicStore> make_local_store();

}  // namespace holmes
