// What is watched is known to be gone once the call has returned that ended it, whoever made it and however.
#include "holmes/core/unmap_watch.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t size = 64 * page;

std::byte* map(void* at = nullptr, std::size_t bytes = size, int flags = 0) {
  void* const made = ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  CHECK(made != MAP_FAILED);
  std::memset(made, 7, bytes);
  return static_cast<std::byte*>(made);
}

bool is_possible() {
  std::byte* const memory = map();
  const auto ticket = unmap_watch::watch(memory, size);
  if (ticket) unmap_watch::release(*ticket);
  ::munmap(memory, size);
  return ticket.has_value();
}

void check_every_end() {
  using End = std::function<void(std::byte*)>;
  const std::vector<End> ends{
      [](std::byte* memory) { ::munmap(memory, size); },
      [](std::byte* memory) { ::munmap(memory + size - page, page); },
      [](std::byte* memory) { ::madvise(memory + page, page, MADV_DONTNEED); },
      [](std::byte* memory) { map(memory + 5 * page, page, MAP_FIXED); },
      [](std::byte* memory) {
        void* const place = map();
        CHECK(::mremap(memory, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
        ::munmap(place, size);
      },
      [](std::byte* memory) { CHECK(::mremap(memory, size, page, 0) != MAP_FAILED); },
  };
  for (const End& end : ends) {
    std::byte* const memory = map();
    // Not only whole pages.
    const auto ticket = unmap_watch::watch(memory + 100, size - 200);
    CHECK(ticket.has_value());
    if (!ticket) return;
    std::memset(memory, 3, size);
    CHECK(unmap_watch::is_whole(*ticket));
    std::thread(end, memory).join();
    CHECK(!unmap_watch::is_whole(*ticket));
    // What comes to its place, where nobody else has taken it, is something else.
    if (map(memory) == memory) CHECK(!unmap_watch::is_whole(*ticket));
    unmap_watch::release(*ticket);
  }
}

void check_that_others_are_left() {
  std::byte* const memory = map(nullptr, 3 * size);
  const auto ticket = unmap_watch::watch(memory + size, size);
  const auto same = unmap_watch::watch(memory + size, size);
  CHECK(ticket && same);
  if (!ticket || !same) return;
  ::munmap(memory, size);
  ::madvise(memory + 2 * size, size, MADV_DONTNEED);
  CHECK(unmap_watch::is_whole(*ticket) && unmap_watch::is_whole(*same));
  // The kernel writes into it as into all memory.
  std::array<int, 2> ends{};
  CHECK(::pipe(ends.data()) == 0);
  CHECK(::write(ends[1], "word", 4) == 4 && ::read(ends[0], memory + size, 4) == 4);
  ::madvise(memory + size + page, page, MADV_DONTNEED);
  CHECK(::write(ends[1], "word", 4) == 4 && ::read(ends[0], memory + size + page, 4) == 4);
  for (const int fd : ends) ::close(fd);
  CHECK(!unmap_watch::is_whole(*ticket) && !unmap_watch::is_whole(*same));
  unmap_watch::release(*ticket);
  unmap_watch::release(*same);
  ::munmap(memory + size, 2 * size);
}

void check_what_cannot_be_watched() {
  void* const shared = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(!unmap_watch::watch(shared, size));
  ::munmap(shared, size);
  CHECK(!unmap_watch::watch(shared, size));  // nothing is there
  std::FILE* const file = std::tmpfile();
  CHECK(file && ::ftruncate(::fileno(file), size) == 0);
  void* const copy = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, ::fileno(file), 0);
  CHECK(!unmap_watch::watch(copy, size));
  ::munmap(copy, size);
  std::fclose(file);
  CHECK(!unmap_watch::watch(nullptr, 0));
  // As many as may be, and again once they are released.
  std::byte* const memory = map();
  std::vector<unmap_watch::Ticket> tickets;
  while (const auto ticket = unmap_watch::watch(memory, page)) tickets.push_back(*ticket);
  CHECK(tickets.size() > 100);
  for (const auto ticket : tickets) unmap_watch::release(ticket);
  const auto again = unmap_watch::watch(memory, page);
  CHECK(again.has_value());
  if (again) unmap_watch::release(*again);
  ::munmap(memory, size);
}

// Threads that map, watch and unmap at once, each where others just did. One may hear late of what another one had
// there, and take its own for gone; never the other way.
void check_threads() {
  std::atomic<int> wrong{0};
  std::atomic<int> seen_whole{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed)
    threads.emplace_back([seed, &wrong, &seen_whole] {
      std::mt19937 random(seed);
      for (int i = 0; i < 300; ++i) {
        std::byte* const memory = map();
        const auto ticket = unmap_watch::watch(memory, size);
        if (ticket && unmap_watch::is_whole(*ticket)) ++seen_whole;
        std::vector<char> other(random() % 300'000);  // which malloc maps, and unmaps
        const bool is_emptied = random() % 2 == 0;
        is_emptied ? ::madvise(memory, page, MADV_DONTNEED) : ::munmap(memory, size);
        if (ticket && unmap_watch::is_whole(*ticket)) ++wrong;
        if (ticket) unmap_watch::release(*ticket);
        if (is_emptied) ::munmap(memory, size);
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(seen_whole > 300);
}

// The child's memory is its own; and it does not take the parent's news.
void check_fork() {
  std::byte* const memory = map();
  const auto ticket = unmap_watch::watch(memory, size);
  CHECK(ticket.has_value());
  if (!ticket) return;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    ::munmap(memory, size / 2);
    const auto own = unmap_watch::watch(memory + size / 2, size / 2);
    bool is_right = own && unmap_watch::is_whole(*own);
    ::munmap(memory + size / 2, size / 2);
    is_right = is_right && !unmap_watch::is_whole(*own);
    ::_exit(is_right ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(unmap_watch::is_whole(*ticket));
  ::munmap(memory, size);
  CHECK(!unmap_watch::is_whole(*ticket));
  unmap_watch::release(*ticket);
}

// Nobody waits for a listener whose descriptor others have closed, and nothing is taken for whole then.
void check_closed_descriptors() {
  for (const bool is_taken : {false, true}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(30);
      std::byte* const memory = map();
      std::byte* const other = map();
      const auto ticket = unmap_watch::watch(memory, size);
      bool is_right = ticket.has_value();
      for (int fd = 3; fd < 1024; ++fd) ::close(fd);
      std::array<int, 2> ends{};
      while (is_taken && ends[1] < 64) is_right = is_right && ::pipe(ends.data()) == 0;  // by what nobody writes to
      ::munmap(memory, size / 2);
      for (int i = 0; i < 1000 && is_right && unmap_watch::is_whole(*ticket); ++i) ::usleep(5000);
      is_right = is_right && !unmap_watch::is_whole(*ticket) && !unmap_watch::watch(other, size);
      ::_exit(is_right ? 0 : 1);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

}  // namespace

int main() {
  ::alarm(200);  // who unmaps waits for the listener
  if (!is_possible()) {
    std::printf("this system does not tell what is unmapped (userfaultfd): skipped\n");
    return 77;
  }
  check_every_end();
  check_that_others_are_left();
  check_what_cannot_be_watched();
  check_threads();
  check_fork();
  check_closed_descriptors();
  return result("unmap watch");
}
