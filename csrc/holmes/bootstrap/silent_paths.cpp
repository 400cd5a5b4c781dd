#include "holmes/bootstrap/silent_paths.hpp"

#include <map>
#include <mutex>

namespace holmes {
namespace {

std::mutex mutex;

std::map<std::string, Clock::time_point>& known() {  // never destroyed: threads may outlive main
  static auto* const paths = new std::map<std::string, Clock::time_point>;
  return *paths;
}

}  // namespace

std::optional<Duration> silent_since(const std::string& path) {
  const std::lock_guard lock(mutex);
  const auto found = known().find(path);
  if (found == known().end()) return std::nullopt;
  const auto ago = Clock::now() - found->second;
  if (ago < silence_is_remembered) return ago;
  known().erase(found);
  return std::nullopt;
}

void remember_silent(const std::string& path) {
  const std::lock_guard lock(mutex);
  known()[path] = Clock::now();
}

void forget_silent(const std::string& path) {
  const std::lock_guard lock(mutex);
  known().erase(path);
}

void forget_silent_paths() {
  const std::lock_guard lock(mutex);
  known().clear();
}

}  // namespace holmes
