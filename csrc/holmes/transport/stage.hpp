// Stage: bytes of a channel that were received ahead of whoever peeks at them, in one piece.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>

namespace holmes {

class Stage {
public:
  std::size_t bytes() const { return end_ - begin_; }
  const std::byte* data() const { return memory_.get() + begin_; }
  // Receives with `recv`, which takes an iovec and returns 0 where nothing more is there, until it holds `bytes`, at
  // most `capacity_bytes`. Throws std::bad_alloc.
  void fill(std::size_t bytes, std::size_t capacity_bytes, const std::function<std::size_t(iovec)>& recv);
  // Copies what it holds into `pieces`, as far as that goes; returns the bytes.
  std::size_t take(std::span<const iovec> pieces);
  void drop(std::size_t bytes) { begin_ += bytes; }

private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;  // aligned to a cache line; capacity_bytes, once there is any
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace holmes
