// UserRegions: ordinary memory that messages went from or to more than once and that stays registered with an HCA until
// it is unmapped (see UnmapWatch) or others need the room.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "holmes/core/unmap_watch.hpp"
#include "holmes/transport/rdma/buffer_regions.hpp"
#include "holmes/transport/rdma/library.hpp"

namespace holmes {

// Thread-safe.
class UserRegions {
public:
  UserRegions(const verbs::Library& library, verbs::ProtectionDomain* domain);
  UserRegions(const UserRegions&) = delete;
  UserRegions& operator=(const UserRegions&) = delete;
  ~UserRegions();

  // For reading by a peer and for writing. Null, and `memory` is to be registered for this message alone: where it
  // comes for the first time, the system does not tell when it is unmapped or forks share what is registered, it cannot
  // be registered so, or it alone would take more than all of these may (an eighth of the memory that this process may
  // lock, or a quarter of what the machine has).
  SharedRegion find(const iovec& memory);
  // Ends all that is not in use, where something else needs the room. Whether there was any.
  bool give_back();

private:
  struct Entry {
    std::uintptr_t begin;
    std::uintptr_t end;
    unmap_watch::Ticket ticket;
    std::uint64_t used;  // when, by `clock_`
    SharedRegion region;
  };
  struct Seen {
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;
    bool is_refused = false;
  };

  Seen* seen(const iovec& memory);
  SharedRegion add(const iovec& memory);
  bool make_room(std::size_t bytes);
  void erase(std::size_t index);

  const verbs::Library& library_;
  verbs::ProtectionDomain* domain_;
  std::uint64_t epoch_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::uint64_t clock_ = 0;
  std::array<Seen, 256> seen_;
  std::size_t next_seen_ = 0;
};

}  // namespace holmes
