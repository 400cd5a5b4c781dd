#include "store_adapter.hpp"

#include <algorithm>
#include <thread>

#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"

namespace holmes::torch_backend {
namespace {

[[noreturn]] void throw_store_error(const std::string& what, const std::string& key, const std::exception& error) {
  throw CommunicatorError("the torch store could not " + what + " key '" + key + "': " + error.what());
}

}  // namespace

void StoreAdapter::set(const std::string& key, const std::string& value) {
  try {
    store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
  } catch (const std::exception& error) {
    throw_store_error("set", key, error);
  }
}

std::string StoreAdapter::get(const std::string& key, Duration timeout) {
  wait(key, timeout);
  try {
    const auto value = store_->get(key);
    return {value.begin(), value.end()};
  } catch (const std::exception& error) {
    throw_store_error("get", key, error);
  }
}

void StoreAdapter::wait(const std::string& key, Duration timeout) {
  // Asked again and again: a TCPStore's own wait prints a warning when its time is up, and holds the store meanwhile.
  constexpr auto longest_pause = std::chrono::milliseconds(20);
  Duration pause = std::chrono::microseconds(200);
  const auto deadline = Clock::now() + timeout;
  try {
    while (!store_->check({key})) {
      if (Clock::now() >= deadline)
        throw TimeoutError("nobody set key '" + key + "' in the torch store within " +
                           std::to_string(std::chrono::duration<double>(timeout).count()) + " s");
      check_signals();
      std::this_thread::sleep_for(pause);
      pause = std::min<Duration>(2 * pause, longest_pause);
    }
  } catch (const HolmesError&) {
    throw;
  } catch (const Interrupted&) {
    throw;
  } catch (const std::exception& error) {
    throw_store_error("wait for", key, error);
  }
}

std::size_t StoreAdapter::remove(std::span<const std::string> keys) {
  std::size_t removed = 0;
  try {
    for (const std::string& key : keys) removed += store_->deleteKey(key);
  } catch (const std::exception&) {  // one of Python's that cannot, or one that is lost
  }
  return removed;
}

std::shared_ptr<Store> StoreAdapter::another_client() {
  try {
    return std::make_shared<StoreAdapter>(store_->clone());
  } catch (const std::exception&) {  // one of Python's that cannot
    return nullptr;
  }
}

}  // namespace holmes::torch_backend
