#include "holmes/collectives/owed_headers.hpp"

#include <algorithm>

namespace holmes {

bool OwedHeaders::receive(Group& group) {
  bool any = false;
  for (Header& header : missing_) {
    char& owed = group.owed[static_cast<std::size_t>(header.peer)];
    if (owed) continue;
    const iovec rest{reinterpret_cast<std::byte*>(&header.theirs) + header.got_bytes,
                     sizeof header.theirs - header.got_bytes};
    if (rest.iov_len > 0) {  // else it did not fit, and is told once more
      const std::size_t bytes = group.channels[static_cast<std::size_t>(header.peer)]->try_recv({&rest, 1});
      header.got_bytes += bytes;
      any |= bytes > 0;
    }
    if (header.got_bytes < sizeof header.theirs)
      owed = 1;
    else
      check_header(header.own, header.theirs, group, header.peer);
  }
  std::erase_if(missing_, [](const Header& header) { return header.got_bytes == sizeof header.theirs; });
  return any;
}

}  // namespace holmes
