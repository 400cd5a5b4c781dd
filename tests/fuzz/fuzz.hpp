// What the fuzzers share: input taken apart, sockets fed with it, seeds written by the real encoders.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "holmes/core/descriptors.hpp"

namespace holmes::fuzz {

// What must hold whatever comes in.
#define REQUIRE(condition)                                                                \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

// The input, from front to back; zeros behind its end.
class Input {
public:
  Input(const std::uint8_t* bytes, std::size_t size) : text_(reinterpret_cast<const char*>(bytes), size) {}
  bool empty() const { return at_ >= text_.size(); }
  std::uint8_t byte() { return empty() ? 0 : static_cast<std::uint8_t>(text_[at_++]); }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value |= std::uint64_t{byte()} << (8 * i);
    return value;
  }
  std::string text(std::size_t bytes) {
    const auto part = text_.substr(std::min(at_, text_.size()), bytes);
    at_ += part.size();
    return part;
  }
  std::string rest() { return text(text_.size()); }

private:
  std::string text_;
  std::size_t at_ = 0;
};

// Two connected, non-blocking stream sockets.
inline std::pair<UniqueFd, UniqueFd> socket_pair() {
  int fds[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

inline void feed(int fd, const std::string& bytes) {
  if (!bytes.empty()) ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

inline std::string drain(int fd) {
  std::string got(1 << 16, '\0');
  const ssize_t bytes = ::recv(fd, got.data(), got.size(), MSG_DONTWAIT);
  got.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  return got;
}

// Valid inputs to begin with: of each fuzzer.
std::vector<std::string> seeds();

}  // namespace holmes::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size);

// `--write-seeds FOLDER` writes the seeds and ends. Strangers are dropped by the thousand: no log.
// (libFuzzer finds it by name: nothing here refers to it.)
extern "C" [[gnu::used]] inline int LLVMFuzzerInitialize(int* argc, char*** argv) {
  ::setenv("HOLMES_LOG", "error", 1);
  if (*argc != 3 || std::strcmp((*argv)[1], "--write-seeds") != 0) return 0;
  int number = 0;
  std::filesystem::create_directories((*argv)[2]);
  for (const std::string& seed : holmes::fuzz::seeds()) {
    std::ofstream((*argv)[2] + ("/seed-" + std::to_string(number++)), std::ios::binary) << seed;
  }
  std::exit(0);
}
