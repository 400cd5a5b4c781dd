// What the writer of a ring in shared memory tells in one cache line: right whenever it is taken, and never taken for
// something else.
#include "holmes/transport/shm/ring_line.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/transport/shm/shm_channel.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

using Note = RingLine::Note;

// As in a new segment.
struct Line {
  alignas(RingLine) std::array<std::byte, sizeof(RingLine)> memory{};
  RingLine& operator*() { return *reinterpret_cast<RingLine*>(memory.data()); }
};

bool is_kept(const Note& note) { return note[5] == 0 && note[6] == 0 && note[7] == 0; }

void check_notes() {
  std::mt19937_64 random(1);
  Line line;
  std::uint64_t produced = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::size_t bytes = 1 + random() % RingLine::most_bytes;
    Note note{};
    for (std::size_t word = 0; word * 8 < bytes; ++word) note[word] = random() % 3 == 0 ? 0 : random();
    if (random() % 4 != 0) note[5] = note[6] = note[7] = 0;
    const std::uint64_t from = std::exchange(produced, produced + bytes);
    (*line).publish(produced, note, bytes);
    CHECK((*line).produced(std::memory_order_acquire) == produced);
    Note read{};
    CHECK((*line).read(from, produced, read) == is_kept(note));
    CHECK(!is_kept(note) || read == note);
    // Neither a part of it, nor it with what was before.
    CHECK(!(*line).read(from + 1, produced, read) && (from == 0 || !(*line).read(from - 1, produced, read)));
    if (random() % 3 != 0) continue;
    produced += random() % 1000 + 1;
    (*line).publish(produced);
    for (std::uint64_t begin = produced - std::min<std::uint64_t>(produced, 200); begin < produced; ++begin)
      CHECK(!(*line).read(begin, produced, read));
  }
}

// While the writer goes on, what is read is what was written, or nothing.
void check_racing() {
  constexpr std::uint64_t notes = 300'000;
  Line line;
  std::atomic<bool> is_done{false};
  const auto word_of = [](std::uint64_t produced, std::size_t word) { return produced * 1'000'003 + word + 1; };
  std::thread writer([&] {
    std::uint64_t produced = 0;
    for (std::uint64_t i = 0; i < notes; ++i) {
      const std::size_t bytes = i % 2 == 0 ? 64 : RingLine::most_bytes;
      produced += bytes;
      Note note{};
      for (const std::size_t word : {0, 1, 2, 3, 4}) note[word] = word_of(produced, word);
      if (bytes > 64) note[8] = word_of(produced, 8);
      (*line).publish(produced, note, bytes);
      if (i % 1000 == 0) std::this_thread::yield();
    }
    is_done = true;
  });
  std::uint64_t seen = 0;
  Note note{};
  while (!is_done) {
    const std::uint64_t produced = (*line).produced(std::memory_order_acquire);
    for (const std::size_t bytes : {std::size_t{64}, RingLine::most_bytes}) {
      if (!(*line).read(produced - bytes, produced, note)) continue;
      ++seen;
      for (const std::size_t word : {0, 1, 2, 3, 4}) CHECK(note[word] == word_of(produced, word));
      CHECK(bytes == 64 || note[8] == word_of(produced, 8));
    }
  }
  writer.join();
  CHECK(seen > 0);
}

struct Ends {
  int rings = 0;  // of doorbells
  std::unique_ptr<ShmChannel> sender, receiver;
  std::size_t ring_bytes = 0;

  Ends() {
    constexpr ShmSegment::RingBytes bytes{64 * 1024, 64 * 1024};
    const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
    CHECK(::ftruncate(fd.get(), static_cast<off_t>(ShmSegment::segment_bytes(bytes))) == 0);
    const auto segment = std::make_shared<ShmSegment>(fd.get(), bytes);
    ring_bytes = segment->ring_bytes(0);
    const auto bell = [this] { ++rings; };
    sender = std::make_unique<ShmChannel>(1, segment, 0, 1, bell, CmaUse::never, ConnectionInfo{});
    receiver = std::make_unique<ShmChannel>(0, segment, 1, 0, bell, CmaUse::never, ConnectionInfo{});
  }
};

// Messages of all sizes, sent short and as others, are the same bytes to whoever takes them either way, however many
// are there.
void check_channel() {
  std::mt19937_64 random(2);
  Ends ends;
  std::vector<std::byte> sent, taken;
  std::size_t in_ring = 0;
  for (int i = 0; i < 50'000; ++i) {
    std::array<std::byte, 300> message{};
    const std::size_t bytes = 1 + random() % (random() % 2 != 0 ? 100 : message.size());
    const std::size_t header_bytes = std::min<std::size_t>(bytes, 40);
    for (std::byte& byte : message) byte = static_cast<std::byte>(random() % 3 == 0 ? 0 : random());
    if (random() % 2 != 0) std::fill(message.begin() + 40, message.begin() + 64, std::byte{0});
    std::vector<iovec> pieces{{message.data(), header_bytes}};
    if (bytes > header_bytes) pieces.push_back({message.data() + header_bytes, bytes - header_bytes});
    if (ends.sender->short_room_bytes() >= bytes && in_ring < 1000) {
      if (random() % 5 != 0)
        ends.sender->send_short(pieces, /*later=*/false);
      else
        CHECK(ends.sender->try_send(pieces) == bytes);
      sent.insert(sent.end(), message.begin(), message.begin() + static_cast<std::ptrdiff_t>(bytes));
      in_ring += bytes;
      if (random() % 3 == 0) continue;
    }
    const auto [came, is_elsewhere] = ends.receiver->view_short(0);
    CHECK(!is_elsewhere && came.size() == in_ring);
    const std::size_t part = random() % 4 == 0 ? random() % (in_ring + 1) : in_ring;
    if (part == 0) continue;
    if (random() % 2 != 0) {
      CHECK(ends.receiver->peek_short(part + in_ring + 1) == nullptr);
      const std::byte* const there = ends.receiver->peek_short(part);
      CHECK(there != nullptr);
      taken.insert(taken.end(), there, there + part);
      ends.receiver->consume(part);
    } else {
      std::vector<std::byte> into(part);
      const iovec room{into.data(), part};
      CHECK(ends.receiver->try_recv({&room, 1}) == part);
      taken.insert(taken.end(), into.begin(), into.end());
    }
    in_ring -= part;
  }
  CHECK(taken.size() > 100 * ends.ring_bytes / 10 && std::equal(taken.begin(), taken.end(), sent.begin()));
}

// What was taken in small parts is told before the receiver sleeps or misses the rest, and a sender that sleeps is
// woken.
void check_room_is_told() {
  for (const bool sleeps : {true, false}) {
    Ends ends;
    std::array<std::byte, 64> message{};
    const iovec piece{message.data(), message.size()};
    std::size_t sent = 0;
    while (ends.sender->short_room_bytes() >= message.size()) {
      ends.sender->send_short({&piece, 1}, /*later=*/false);
      sent += message.size();
    }
    CHECK(sent == ends.ring_bytes && ends.sender->try_send({&piece, 1}) == 0);
    std::vector<pollfd> fds;
    CHECK(ends.sender->prepare_wait(false, true, fds));
    CHECK(ends.receiver->peek_short(message.size()) != nullptr);
    ends.receiver->consume(message.size());
    if (sleeps)
      static_cast<void>(ends.receiver->prepare_wait(true, false, fds));
    else
      CHECK(ends.receiver->try_peek(ends.ring_bytes) == nullptr);
    CHECK(ends.rings == 1);
    ends.sender->finish_wait(Clock::now(), {});
    CHECK(ends.sender->try_send({&piece, 1}) == message.size());
  }
}

}  // namespace

int main() {
  check_notes();
  check_racing();
  check_channel();
  check_room_is_told();
  return result("test_ring_line");
}
