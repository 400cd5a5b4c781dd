// Memory that another process reads where it is: who finds it, what stays of it, and what is refused.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>

#include "check.hpp"
#include "holmes/transport/shared_buffer.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr std::size_t bytes = 1'000'001;

// In a process of its own; its result is whether `body` returned true.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  return child > 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void check_places() {
  auto first = std::make_unique<SharedBuffer>(bytes);
  const SharedBuffer second(1);
  const auto place = SharedBuffer::place_of(first->data() + 10, bytes - 10);
  CHECK(place.id != 0 && place.offset == 10 && place.buffer_bytes == bytes);
  CHECK(SharedBuffer::place_of(first->data() + 10, bytes - 9).id == 0);
  CHECK(SharedBuffer::place_of(first->data() - 1, 1).id == 0);
  CHECK(SharedBuffer::place_of(&place, sizeof place).id == 0);
  const auto other = SharedBuffer::place_of(second.data(), 1);
  CHECK(other.id != 0 && other.id != place.id);
  const std::byte* const data = first->data();
  first.reset();
  CHECK(SharedBuffer::place_of(data, 1).id == 0);
}

void check_another_process() {
  SharedBuffer buffer(bytes);
  CHECK(std::all_of(buffer.data(), buffer.data() + bytes, [](std::byte value) { return value == std::byte{0}; }));
  std::memset(buffer.data(), 7, bytes);
  const pid_t owner = ::getpid();
  const auto place = SharedBuffer::place_of(buffer.data(), bytes);
  CHECK(in_child([&] {
    PeerBuffers peers;
    const std::byte* seen = peers.find(owner, place, bytes);
    if (!seen || seen == buffer.data() || std::memcmp(seen, buffer.data(), bytes) != 0) return false;
    auto wrong = place;
    wrong.id += 2;  // another buffer that got its descriptor's number
    auto longer = place;
    longer.buffer_bytes += 1;
    auto outside = place;
    outside.offset = 1;
    return !peers.find(owner, wrong, bytes) && !PeerBuffers().find(owner, longer, bytes + 1) &&
           !peers.find(owner, outside, bytes) && !PeerBuffers().find(0, place, bytes);
  }));
}

// To a child it is ordinary memory; the parent's is neither changed nor let go of there.
void check_forked_owner() {
  auto buffer = std::make_unique<SharedBuffer>(bytes);
  std::memset(buffer->data(), 7, bytes);
  CHECK(in_child([&] {
    const bool is_as_it_was = buffer->data()[bytes - 1] == std::byte{7};
    std::memset(buffer->data(), 8, bytes);
    const SharedBuffer own(bytes);
    const bool is_found = SharedBuffer::place_of(buffer->data(), 1).id != 0;
    const bool is_own_found = SharedBuffer::place_of(own.data(), 1).id != 0;
    buffer.reset();
    return is_as_it_was && !is_found && is_own_found;
  }));
  CHECK(buffer->data()[bytes - 1] == std::byte{7});
}

// Mapped elsewhere still: its pages are free all the same, and reading it is no fault.
void check_end() {
  auto buffer = std::make_unique<SharedBuffer>(bytes);
  std::memset(buffer->data(), 7, bytes);
  const auto place = SharedBuffer::place_of(buffer->data(), bytes);
  const UniqueFd file(::fcntl(place.fd, F_DUPFD_CLOEXEC, 0));
  PeerBuffers peers;
  const std::byte* seen = peers.find(::getpid(), place, bytes);
  CHECK(seen != nullptr);
  buffer.reset();
  struct stat status{};
  CHECK(::fstat(file.get(), &status) == 0 && status.st_blocks * 512 < 20'000);
  CHECK(seen && seen[bytes - 1] == std::byte{0});
  CHECK(::ftruncate(file.get(), 0) != 0);
}

void check_limits() {
  CHECK(contains(message_of<UsageError>([] { SharedBuffer buffer(0); }), "0 bytes"));
  CHECK(contains(message_of<SystemError>([] { SharedBuffer buffer(~std::size_t{0}); }), "shared buffer"));
  // More than there is: an error, as of ordinary memory, not the end of the process when it is written.
  CHECK(in_child([] {
    ::alarm(1);
    return contains(message_of<SystemError>([] { SharedBuffer buffer(std::size_t{1} << 46); }), "memory");
  }));
  CHECK(in_child([] {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_NOFILE, &none);
    return contains(message_of<SystemError>([] { SharedBuffer buffer(bytes); }), "open files");
  }));
}

}  // namespace

int main() {
  check_places();
  check_another_process();
  check_forked_owner();
  check_end();
  check_limits();
  return result("test_shared_buffer");
}
