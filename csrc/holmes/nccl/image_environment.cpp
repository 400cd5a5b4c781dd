#include "holmes/nccl/image_environment.hpp"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "holmes/core/error.hpp"

namespace holmes::nccl {
namespace {

// getenv has no argument that says who asks, so that each image calls functions of its own: number i asks environment
// i.
std::array<std::atomic<ImageEnvironment*>, ImageEnvironment::capacity> environments{};

template <std::size_t i>
char* image_getenv(const char* name) {
  return environments[i].load(std::memory_order_acquire)->get(name);
}
template <std::size_t i>
int image_setenv(const char* name, const char* value, int overwrite) {
  return environments[i].load(std::memory_order_acquire)->set(name, value, overwrite != 0);
}
template <std::size_t i>
int image_unsetenv(const char* name) {
  return environments[i].load(std::memory_order_acquire)->unset(name);
}

struct Functions {
  ImageEnvironment::Getenv* get;
  ImageEnvironment::Setenv* set;
  ImageEnvironment::Unsetenv* unset;
};
constexpr auto functions = []<std::size_t... i>(std::index_sequence<i...>) {
  return std::array<Functions, sizeof...(i)>{Functions{image_getenv<i>, image_setenv<i>, image_unsetenv<i>}...};
}(std::make_index_sequence<ImageEnvironment::capacity>());

}  // namespace

ImageEnvironment& ImageEnvironment::make(Variables variables) {
  static std::atomic<std::size_t> next{0};
  const std::size_t number = next.fetch_add(1);
  if (number >= capacity)
    throw UsageError("this process already has " + std::to_string(capacity) +
                     " NCCL images, and no more are possible: use fewer different NIC selections");
  auto* environment = new ImageEnvironment(std::move(variables));
  environment->getenv_ = functions[number].get;
  environment->setenv_ = functions[number].set;
  environment->unsetenv_ = functions[number].unset;
  environments[number].store(environment, std::memory_order_release);
  return *environment;
}

char* ImageEnvironment::get(const char* name) {
  if (name == nullptr) return nullptr;
  if (const auto found = variables_.find(std::string_view(name)); found != variables_.end()) {
    answered_.fetch_add(1, std::memory_order_relaxed);
    return found->second ? const_cast<char*>(found->second->c_str()) : nullptr;
  }
  if (char* value = std::getenv(name)) return value;
  std::lock_guard lock(mutex_);
  const auto found = set_by_image_.find(std::string_view(name));
  return found == set_by_image_.end() ? nullptr : const_cast<char*>(found->second->c_str());
}

int ImageEnvironment::set(const char* name, const char* value, bool overwrite) {
  if (name == nullptr || *name == '\0' || value == nullptr) {
    errno = EINVAL;
    return -1;
  }
  std::lock_guard lock(mutex_);
  if (!overwrite && set_by_image_.contains(std::string_view(name))) return 0;
  set_by_image_[name] = &values_.emplace_back(value);
  return 0;
}

int ImageEnvironment::unset(const char* name) {
  std::lock_guard lock(mutex_);
  set_by_image_.erase(std::string(name == nullptr ? "" : name));
  return 0;
}

}  // namespace holmes::nccl
