// Image: one more copy of the stock NCCL in this process, with NIC lists of its own, chosen by its profile.
// ImageEnvironment: the environment that it sees; the process's own is never written.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "holmes/nccl/api.hpp"
#include "holmes/nccl/profile.hpp"

namespace holmes::nccl {

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

class Image {
public:
  const Api& api() const { return api_; }
  const Profile& profile() const { return profile_; }
  // "sparse image 1 of /usr/lib/libnccl.so.2"
  const std::string& text() const { return text_; }
  // How often the image was answered by its profile. 0 after its first call would mean that it looks elsewhere.
  std::uint64_t answered() const { return environment_->answered(); }

private:
  friend const Image& image_for(const Profile& profile, const Library& library);
  Image(const Profile& profile, const Library& library, int number);

  Profile profile_;
  std::string text_;
  ImageEnvironment* environment_ = nullptr;
  Api api_;
};

// The image of this profile; made at the first call and kept as long as the process lives (a library that has started
// threads must not be unloaded). The caller has checked the profile. Thread-safe. Throws SystemError or UsageError
// where none can be made, saying what was tried.
const Image& image_for(const Profile& profile, const Library& library);

}  // namespace holmes::nccl
