// Image: one more copy of the stock NCCL in this process, with NIC lists of its own, chosen by its profile.
#pragma once

#include <cstdint>
#include <string>

#include "holmes/nccl/api.hpp"
#include "holmes/nccl/library.hpp"
#include "holmes/nccl/profile.hpp"

namespace holmes::nccl {

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
