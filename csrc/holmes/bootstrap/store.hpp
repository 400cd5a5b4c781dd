// Store: the rendezvous that bootstraps a communicator. Three methods, so that any key-value store will do.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>

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
  // Removes those of `keys` that are there, where the store can, for who knows that nobody reads them any more.
  virtual void remove(std::span<const std::string> /*keys*/) {}
  // A client of its own, for a thread of the library's, where the owner's calls hold up all others of one client; else
  // null.
  virtual std::shared_ptr<Store> another_client() { return nullptr; }
};

// A view of `base` in which every key gets `prefix` and a slash in front.
class PrefixStore final : public Store {
public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> base);
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Duration timeout) override;
  void wait(const std::string& key, Duration timeout) override;
  void remove(std::span<const std::string> keys) override;
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
std::shared_ptr<Store> make_local_store();

}  // namespace holmes
