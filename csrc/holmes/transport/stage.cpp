#include "holmes/transport/stage.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "holmes/reduce/copy.hpp"

namespace holmes {

void Stage::fill(std::size_t bytes, std::size_t capacity_bytes, const std::function<std::size_t(iovec)>& recv) {
  constexpr std::size_t cache_line_bytes = 64;
  if (!memory_) memory_.reset(static_cast<std::byte*>(std::aligned_alloc(cache_line_bytes, capacity_bytes)));
  if (!memory_) throw std::bad_alloc();
  if (begin_ > 0) std::memmove(memory_.get(), memory_.get() + begin_, this->bytes());
  end_ -= std::exchange(begin_, 0);
  while (end_ < bytes) {
    const std::size_t received = recv({memory_.get() + end_, bytes - end_});
    if (received == 0) break;
    end_ += received;
  }
}

std::size_t Stage::take(std::span<const iovec> pieces) {
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    const std::size_t bytes = std::min(piece.iov_len, this->bytes());
    copy_cached(piece.iov_base, data(), bytes);
    begin_ += bytes;
    total += bytes;
  }
  return total;
}

}  // namespace holmes
