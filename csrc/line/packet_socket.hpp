// Packet sockets, which an unprivileged user has in a namespace of their own (where /dev/net/tun may be root's).
#pragma once

#include <chrono>
#include <string>

#include "holmes/core/descriptors.hpp"
#include "line/frame.hpp"

namespace holmes::line {

// The largest frame that is taken from a device: senders are told to make none larger (python_api/.../fabric.py).
inline constexpr std::size_t most_frame_bytes = 16384;

// What comes in at a device, through memory shared with the kernel: a socket's own buffer is too small for a fast link
// where net.core.rmem_max is what distributions make it, and cannot be made larger without root.
class Receiver {
public:
  // Throws std::system_error.
  explicit Receiver(const std::string& device);
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // The next frame, empty where none is there; it stays until release(). One that was too large is left out and
  // counted.
  Bytes front();
  // How long ago it came.
  std::chrono::nanoseconds age() const;
  void release();

  int fd() const { return socket_.get(); }
  std::uint64_t too_large() const { return too_large_; }
  // Frames that found the memory full, since the last call.
  std::uint64_t take_overflowed();

private:
  std::uint8_t* slot() const { return ring_ + next_ * slot_bytes; }

  static constexpr std::size_t slot_bytes = most_frame_bytes + 1024;  // with the kernel's headers; 16 fill whole pages
  static constexpr std::size_t slots = 512;

  UniqueFd socket_;
  std::uint8_t* ring_ = nullptr;
  std::size_t next_ = 0;
  std::uint64_t too_large_ = 0;
};

// Puts frames onto a device.
class Sender {
public:
  // Throws std::system_error.
  explicit Sender(const std::string& device);

  enum class Result { sent, busy, refused };
  // `busy`: the device holds as much of this socket's as it may, or is down for the moment.
  Result send(Bytes frame);

  int fd() const { return socket_.get(); }

private:
  UniqueFd socket_;
};

}  // namespace holmes::line
