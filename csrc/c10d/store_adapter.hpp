// StoreAdapter: a c10d::Store as holmes::Store.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "holmes/bootstrap/store.hpp"

namespace holmes::torch_backend {

// Thread-safe as far as `store` is. Throws TimeoutError naming the key, or CommunicatorError where the store itself
// fails (its server is gone).
class StoreAdapter final : public Store {
public:
  explicit StoreAdapter(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Duration timeout) override;
  void wait(const std::string& key, Duration timeout) override;
  std::size_t remove(std::span<const std::string> keys) override;
  std::shared_ptr<Store> another_client() override;

private:
  c10::intrusive_ptr<::c10d::Store> store_;
};

}  // namespace holmes::torch_backend
