#include "holmes/transport/shared_buffer.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <mutex>
#include <string>
#include <type_traits>

#include "holmes/core/block_map.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/random.hpp"
#include "holmes/core/types.hpp"

namespace holmes {
namespace {

// At the end of the memory file, in a page of its own.
struct Header {
  std::uint64_t id;
  std::uint64_t bytes;  // of the data
  std::atomic<std::uint32_t> is_gone;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "shared between processes");

// Of the whole file of a buffer of so many bytes.
std::size_t file_bytes(std::size_t buffer_bytes) {
  return (buffer_bytes + page_bytes() - 1) / page_bytes() * page_bytes() + page_bytes();
}

template <typename Byte>
auto& header_of(Byte* base, std::size_t buffer_bytes) {
  using Found = std::conditional_t<std::is_const_v<Byte>, const Header, Header>;
  return *reinterpret_cast<Found*>(base + file_bytes(buffer_bytes) - page_bytes());
}

// A huge page of x86-64. Copies through small ones take a fifth more time (measured on Zen 4 in a virtual machine).
constexpr std::size_t huge_bytes = 2 * 1024 * 1024;

// Maps all of the file, where huge pages fit. nullptr where the system refuses.
std::byte* map_file(int fd, std::size_t bytes, int protection) {
  const std::size_t reserved_bytes = bytes + huge_bytes;
  // As ordinary memory at first, of which the system refuses what it does not have; of a file it refuses nothing, and
  // ends processes where it is written.
  void* reserved = ::mmap(nullptr, reserved_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(reserved);
  const std::size_t before = (huge_bytes - reinterpret_cast<std::uintptr_t>(begin) % huge_bytes) % huge_bytes;
  const std::size_t mapped_bytes = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  void* const mapped = ::mmap(begin + before, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  const int error = errno;
  if (mapped == MAP_FAILED) {
    ::munmap(begin, reserved_bytes);
    errno = error;
    return nullptr;
  }
  if (before > 0) ::munmap(begin, before);
  const std::size_t after = reserved_bytes - before - mapped_bytes;
  if (after >= page_bytes()) ::munmap(begin + before + mapped_bytes, after);
  return static_cast<std::byte*>(mapped);
}

// Gives the data its memory now, in huge pages where the system has some: by itself it would give a file small ones.
void ask_for_huge_pages(std::byte* data, std::size_t bytes) {
  constexpr int collapse = 25;  // MADV_COLLAPSE, of Linux 6.1
  const std::size_t whole = bytes / huge_bytes * huge_bytes;
  // Where there is no page at all it would leave it.
  for (std::size_t at = 0; at < whole; at += huge_bytes) *static_cast<volatile std::byte*>(data + at) = std::byte{0};
  if (whole > 0) ::madvise(data, whole, collapse);
}

// The living buffers of this process, by the address of their data.
struct LivingBuffers {
  struct Entry {
    std::size_t bytes;
    std::uint64_t id;
    std::int32_t fd;
    std::uint64_t epoch;  // see fork_epoch
  };
  std::mutex mutex;
  BlockMap<Entry> entries;
  std::atomic<std::size_t> count{0};  // read without the lock: most processes have none

  // What the child writes is its own from now on, as in all other memory. (Where the system does not grant memory for
  // that, it may only read.)
  void after_fork_in_child() {
    for (const auto& [begin, entry] : entries) {
      void* const base = reinterpret_cast<void*>(begin);
      const std::size_t bytes = file_bytes(entry.bytes);
      constexpr int flags = MAP_PRIVATE | MAP_FIXED;
      if (::mmap(base, bytes, PROT_READ | PROT_WRITE, flags, entry.fd, 0) == MAP_FAILED)
        ::mmap(base, bytes, PROT_READ, flags, entry.fd, 0);
    }
  }
};

// Buffers may outlive static destruction.
LivingBuffers& living_buffers() { return fork_registry<LivingBuffers>(); }

// Whether the process can still open some files beside this one, the last of which an array should not take.
bool leaves_descriptors(int fd) {
  constexpr rlim_t kept = 64;
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) != 0 || static_cast<rlim_t>(fd) + kept < limit.rlim_cur;
}

SystemError no_buffer(std::size_t bytes, int error) {
  return SystemError("cannot make a shared buffer of " + std::to_string(bytes) + " bytes: " + errno_text(error) +
                         limit_text(error) +
                         "; check the limits of memory, of address space (ulimit -v) and of open files (each buffer "
                         "takes one), or use ordinary memory",
                     {.rank = {}, .peer = {}, .host = {}, .nic = "shm", .system_errno = error});
}

}  // namespace

SharedBuffer::SharedBuffer(std::size_t bytes) : bytes_(bytes), id_(random_number() | 1), epoch_(fork_epoch()) {
  if (bytes == 0) throw UsageError("a shared buffer of 0 bytes: it has at least one");
  if (bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max()) - 2 * huge_bytes)
    throw no_buffer(bytes, ENOMEM);
  hold_standard_descriptors();
  raise_open_files_limit();
  fd_.reset(::memfd_create("holmes-buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd_ && !leaves_descriptors(fd_.get())) throw no_buffer(bytes, EMFILE);
  const std::size_t all = file_bytes(bytes);
  // Sealed: whoever reads it in place is not to be ended by SIGBUS.
  if (!fd_ || ::ftruncate(fd_.get(), static_cast<off_t>(all)) != 0 ||
      ::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw no_buffer(bytes, errno);
  data_ = map_file(fd_.get(), all, PROT_READ | PROT_WRITE);
  if (!data_) throw no_buffer(bytes, errno);
  header_of(data_, bytes).id = id_;
  header_of(data_, bytes).bytes = bytes;
  try {
    lasting_.emplace(data_, bytes_);
    LivingBuffers& own = living_buffers();
    std::lock_guard lock(own.mutex);
    own.entries.emplace(reinterpret_cast<std::uintptr_t>(data_), LivingBuffers::Entry{bytes_, id_, fd_.get(), epoch_});
    own.count = own.entries.size();
  } catch (...) {
    lasting_.reset();
    ::munmap(data_, all);
    throw;
  }
  ask_for_huge_pages(data_, bytes);
}

SharedBuffer::~SharedBuffer() {
  lasting_.reset();
  LivingBuffers& own = living_buffers();
  {
    std::lock_guard lock(own.mutex);
    own.entries.erase(reinterpret_cast<std::uintptr_t>(data_));
    own.count = own.entries.size();
  }
  // In a forked child it is the parent's still.
  if (epoch_ == fork_epoch()) {
    header_of(data_, bytes_).is_gone = 1;
    ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                static_cast<off_t>(file_bytes(bytes_) - page_bytes()));
  }
  ::munmap(data_, file_bytes(bytes_));
}

BufferPlace SharedBuffer::place_of(const void* data, std::size_t bytes) noexcept {
  LivingBuffers& own = living_buffers();
  if (own.count.load(std::memory_order_acquire) == 0) return {};
  std::lock_guard lock(own.mutex);
  const auto* const found = block_around(own.entries, data, bytes);
  if (!found) return {};
  const auto& [begin, entry] = *found;
  return {entry.id, reinterpret_cast<std::uintptr_t>(data) - begin, entry.bytes, entry.fd};
}

PeerBuffers::~PeerBuffers() {
  for (const Mapped& mapped : mapped_) unmap(mapped);
}

const std::byte* PeerBuffers::find(std::int32_t pid, const BufferPlace& place, std::size_t bytes) {
  if (place.offset > place.buffer_bytes || bytes > place.buffer_bytes - place.offset) return nullptr;
  const auto known = std::ranges::find(mapped_, place.id, &Mapped::id);
  const Mapped* mapped = known != mapped_.end() ? &*known : map(pid, place);
  return mapped && mapped->bytes == place.buffer_bytes ? mapped->base + place.offset : nullptr;
}

const PeerBuffers::Mapped* PeerBuffers::map(std::int32_t pid, const BufferPlace& place) {
  tidy();
  mapped_.reserve(mapped_.size() + 1);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, place.fd);
  const std::size_t bytes = file_bytes(place.buffer_bytes);
  // Another process may have this number, and something else there that is not to be opened.
  struct stat status{};
  if (::stat(path, &status) != 0 || !S_ISREG(status.st_mode) || static_cast<std::size_t>(status.st_size) != bytes)
    return nullptr;
  const UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  // Sealed: it cannot be cut off below a reader.
  constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  const int has_seals = fd ? ::fcntl(fd.get(), F_GET_SEALS) : -1;
  if (has_seals < 0 || (has_seals & seals) != seals || ::fstat(fd.get(), &status) != 0 ||
      static_cast<std::size_t>(status.st_size) != bytes)
    return nullptr;
  const std::byte* base = map_file(fd.get(), bytes, PROT_READ);
  if (!base) return nullptr;
  const Mapped fresh{place.id, base, place.buffer_bytes};
  const Header& header = header_of(base, fresh.bytes);
  if (header.id != place.id || header.bytes != fresh.bytes) {
    unmap(fresh);
    return nullptr;
  }
  return &*mapped_.insert(mapped_.begin(), fresh);
}

void PeerBuffers::unmap(const Mapped& mapped) {
  ::munmap(const_cast<std::byte*>(mapped.base), file_bytes(mapped.bytes));
}

void PeerBuffers::tidy() {
  constexpr std::size_t most = 1024;  // a process may have some 65,000 mappings (vm.max_map_count)
  std::size_t kept = 0;
  std::erase_if(mapped_, [&](const Mapped& mapped) {
    if (header_of(mapped.base, mapped.bytes).is_gone == 0 && ++kept < most) return false;
    unmap(mapped);
    return true;
  });
}

}  // namespace holmes
