// UnmapWatch: tells whether ordinary memory of this process is still what it was, so that what is known of it (its
// registration with an HCA) may be kept. It hears of munmap, mremap, mmap over it and madvise(MADV_DONTNEED) by
// userfaultfd, from the kernel and before such a call returns, whoever makes it: no function of libc is replaced.
//
// A thread of its own hears it. Who unmaps watched memory waits for that thread, 0.1 ms; so nothing that may
// unmap (free, say) is called with the lock held, or by that thread.
#pragma once

#include <cstddef>
#include <optional>

namespace holmes::unmap_watch {

// A range that is watched, until it is released.
using Ticket = std::size_t;

// Watches the pages of `bytes` bytes at `begin`. Nothing where the system does not tell (Linux 5.11 or later does, but
// for containers that forbid userfaultfd), the memory is of a file or shared, it has no descriptor left, or so many
// are watched as may be. In a forked child nothing of the parent's is watched, and its tickets are no more.
// Thread-safe.
std::optional<Ticket> watch(const void* begin, std::size_t bytes) noexcept;

// Whether no part of it was unmapped, moved or emptied since. What ended in a call that has returned is known here.
bool is_whole(Ticket ticket) noexcept;

void release(Ticket ticket) noexcept;

}  // namespace holmes::unmap_watch
