// ImageEnvironment: the environment that one NCCL image sees. The process's own is never written.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace holmes::nccl {

// By name; an absent value hides the variable.
using Variables = std::map<std::string, std::optional<std::string>, std::less<>>;

// Serves an image's calls of getenv, setenv and unsetenv. Order: the variables given here, the process's environment,
// what the image itself has set (NCCL does so with the lines of its configuration files). It lives as long as the
// process, so that every pointer it gave stays valid. Thread-safe.
class ImageEnvironment {
public:
  using Getenv = char*(const char*);
  using Setenv = int(const char*, const char*, int);
  using Unsetenv = int(const char*);

  // An environment with functions of its own. Throws UsageError where all `capacity` are in use.
  static ImageEnvironment& make(Variables variables);
  static constexpr std::size_t capacity = 128;

  Getenv* getenv_function() const { return getenv_; }
  Setenv* setenv_function() const { return setenv_; }
  Unsetenv* unsetenv_function() const { return unsetenv_; }
  // How many questions the given variables answered (also by hiding one): proof that the image asks here.
  std::uint64_t answered() const { return answered_.load(std::memory_order_relaxed); }

  char* get(const char* name);
  int set(const char* name, const char* value, bool overwrite);
  int unset(const char* name);

private:
  explicit ImageEnvironment(Variables variables) : variables_(std::move(variables)) {}

  const Variables variables_;
  std::atomic<std::uint64_t> answered_{0};
  std::mutex mutex_;
  std::map<std::string, const std::string*, std::less<>> set_by_image_;
  std::deque<std::string> values_;  // all that were ever set: the image may hold pointers into them
  Getenv* getenv_ = nullptr;
  Setenv* setenv_ = nullptr;
  Unsetenv* unsetenv_ = nullptr;
};

}  // namespace holmes::nccl
