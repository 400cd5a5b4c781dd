// Pieces that the receiver copies out of the sender's memory: what comes, in which order, and who waits for whom; when
// a channel chooses them. Two ends of one channel in one process.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include "check.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/transport/shm/shm_channel.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr std::size_t ring_bytes = 128 * 1024;
constexpr std::size_t large_bytes = 600 * 1024;  // does not fit the ring

struct Pair {
  explicit Pair(CmaUse cma, CmaUse receiver_cma, std::size_t of_ring = ring_bytes, Duration patience = {}) {
    const ShmSegment::RingBytes bytes{of_ring, ring_bytes / 2};
    const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
    CHECK(::ftruncate(fd.get(), static_cast<off_t>(ShmSegment::segment_bytes(bytes))) == 0);
    segment = std::make_shared<ShmSegment>(fd.get(), bytes);
    sender = std::make_unique<ShmChannel>(
        1, segment, 0, 1, [this] { ++doorbells; }, cma, ConnectionInfo{}, nullptr, patience);
    receiver = std::make_unique<ShmChannel>(0, segment, 1, 0, [this] { ++doorbells; }, receiver_cma, ConnectionInfo{});
  }
  explicit Pair(CmaUse cma) : Pair(cma, cma) {}
  bool is_region_open() const {
    return (segment->ring(0).cma.state.load() & 3) == CmaRegion::open && segment->ring(0).cma.end > 0;
  }

  std::shared_ptr<ShmSegment> segment;
  std::unique_ptr<ShmChannel> sender, receiver;
  int doorbells = 0;
};

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

iovec piece(std::span<std::byte> data, std::size_t from, std::size_t bytes) { return {data.data() + from, bytes}; }

bool would_sleep(Channel& channel, bool for_recv, bool for_send) {
  std::vector<pollfd> fds;
  const bool sleeps = channel.prepare_wait(for_recv, for_send, fds);
  channel.finish_wait({}, {});
  return sleeps;
}

constexpr std::size_t stream_bytes = 24 * 1024 * 1024;

// Pieces of all sizes, received in other ones, copied or peeked at, through the ring and out of the sender's memory in
// turns.
void check_stream(CmaUse cma, CmaUse receiver_cma, std::span<std::byte> source, std::optional<CopyWay> way = {},
                  std::size_t of_ring = ring_bytes) {
  Pair pair(cma, receiver_cma, of_ring);
  pair.sender->set_way(way, false);
  const std::size_t total = source.size();
  std::vector<std::byte> arrived(total);
  std::mt19937 random(2);
  const auto any_bytes = [&](std::size_t left) {
    const std::size_t most = std::size_t{1} << (6 + random() % 15);
    return std::min<std::size_t>(left, 1 + random() % most);
  };
  std::size_t sent = 0, received = 0, piece_end = 0, peek_bytes = 0, idle = 0;
  bool saw_region = false;
  while ((received < total || sent < total) && idle < 1000) {
    if (sent == piece_end) piece_end = sent + any_bytes(total - sent);
    std::size_t moved = 0;
    if (sent < piece_end) {
      const iovec pieces[] = {piece(source, sent, piece_end - sent)};
      moved += pair.sender->try_send(pieces);
      sent += moved;
    }
    saw_region |= pair.is_region_open();
    if (random() % 8 == 0) would_sleep(*pair.sender, false, sent < piece_end);
    if (peek_bytes == 0 && random() % 2)
      peek_bytes = std::min<std::size_t>(any_bytes(total - received), ring_bytes / 2);
    if (peek_bytes > 0) {
      // What was offered may end before it, and the peer is not asked for more than it offered.
      if (const std::byte* data = pair.receiver->try_peek(peek_bytes)) {
        std::memcpy(arrived.data() + received, data, peek_bytes);
        pair.receiver->consume(peek_bytes);
        received += std::exchange(peek_bytes, 0);
        ++moved;
      }
    } else {
      const std::size_t first = any_bytes(total - received);
      const iovec pieces[] = {piece(arrived, received, first),
                              piece(arrived, received + first, any_bytes(total - received - first + 1) - 1)};
      const std::size_t bytes = pair.receiver->try_recv(pieces);
      received += bytes;
      moved += bytes;
    }
    idle = moved ? 0 : idle + 1;
  }
  CHECK(received == total);
  CHECK(std::ranges::equal(arrived, source));
  CHECK(pair.sender->sent_bytes() == total && pair.receiver->received_bytes() == total);
  CHECK(saw_region == (cma != CmaUse::never));
}

// The sender's memory is its own again only when the receiver has it all.
void check_completion() {
  Pair pair(CmaUse::always);
  auto source = pattern(large_bytes, 3);
  std::vector<std::byte> arrived(large_bytes);
  const iovec all[] = {piece(source, 0, large_bytes)};
  CHECK(pair.sender->try_send(all) == 0);
  CHECK(pair.sender->try_send(all) == 0);
  const iovec half[] = {piece(arrived, 0, large_bytes / 2)};
  const std::size_t pulled = pair.receiver->try_recv(half);
  CHECK(pulled > 0 && pulled <= large_bytes / 2);
  // No more than was offered, though more is gone.
  const iovec little[] = {piece(source, 0, 100)};
  CHECK(pair.sender->try_send(little) == 100);
  const iovec rest[] = {piece(source, 100, large_bytes - 100)};
  CHECK(pair.sender->try_send(rest) == pulled - 100);
  CHECK(would_sleep(*pair.sender, false, true));  // the receiver is at it
  std::size_t received = pulled;
  while (received < large_bytes) {
    const iovec more[] = {piece(arrived, received, large_bytes - received)};
    received += pair.receiver->try_recv(more);
  }
  const iovec last[] = {piece(source, pulled, large_bytes - pulled)};
  CHECK(pair.sender->try_send(last) == large_bytes - pulled);
  CHECK(arrived == source);
}

// Nobody comes for it: as much as the ring holds is sent all the same, as without CMA.
void check_withdrawal() {
  Pair pair(CmaUse::always);
  auto source = pattern(ring_bytes, 4);
  const iovec all[] = {piece(source, 0, ring_bytes)};
  CHECK(pair.sender->try_send(all) == 0);
  CHECK(!would_sleep(*pair.sender, false, true));
  for (std::size_t sent = 0, calls = 0; sent < ring_bytes && calls < 10; ++calls) {
    const iovec rest[] = {piece(source, sent, ring_bytes - sent)};
    sent += pair.sender->try_send(rest);
  }
  CHECK(pair.sender->sent_bytes() == ring_bytes);
  std::vector<std::byte> arrived(ring_bytes);
  for (std::size_t received = 0, calls = 0; received < ring_bytes && calls < 10; ++calls) {
    const iovec into[] = {piece(arrived, received, ring_bytes - received)};
    received += pair.receiver->try_recv(into);
  }
  CHECK(arrived == source);
}

// But not at once: the receiver may be about to come.
void check_patience() {
  constexpr Duration patience = std::chrono::milliseconds(20);
  Pair pair(CmaUse::always, CmaUse::always, ring_bytes, patience);
  auto source = pattern(2 * ring_bytes, 4);
  std::vector<std::byte> arrived(2 * ring_bytes);
  CHECK(!pair.sender->next_look());
  const iovec all[] = {piece(source, 0, source.size())};
  const auto before = Clock::now();
  CHECK(pair.sender->try_send(all) == 0);
  const auto at = pair.sender->next_look();
  CHECK(at && *at >= before + patience && *at <= Clock::now() + patience);
  CHECK(would_sleep(*pair.sender, false, true) || Clock::now() >= *at);
  std::this_thread::sleep_until(*at);
  CHECK(!would_sleep(*pair.sender, false, true));
  CHECK(pair.sender->try_send(all) > 0);
  // Who has come is waited for, however slow.
  Pair begun(CmaUse::always, CmaUse::always);
  CHECK(begun.sender->try_send(all) == 0);
  const iovec part[] = {piece(arrived, 0, ring_bytes)};
  CHECK(begun.receiver->try_recv(part) == ring_bytes);
  CHECK(!begun.sender->next_look());
  CHECK(would_sleep(*begun.sender, false, true));
}

// A receiver that was through before this side said that it sleeps wakes nobody.
void check_end_before_sleep() {
  Pair pair(CmaUse::always);
  auto source = pattern(large_bytes, 14);
  std::vector<std::byte> arrived(large_bytes);
  const iovec out[] = {piece(source, 0, large_bytes)};
  CHECK(pair.sender->try_send(out) == 0);
  const iovec in[] = {piece(arrived, 0, large_bytes)};
  CHECK(pair.receiver->try_recv(in) == large_bytes);
  CHECK(pair.doorbells == 0);
  CHECK(!would_sleep(*pair.sender, false, true));
  CHECK(pair.sender->try_send(out) == large_bytes);
}

// What lies between large pieces, as headers of messages do, comes without a system call, and apart from them.
void check_copied_pieces() {
  Pair pair(CmaUse::always);
  constexpr std::size_t header_bytes = CmaRegion::max_copied_bytes;
  auto source = pattern(3 * (header_bytes + large_bytes), 10);
  std::vector<std::byte> arrived(source.size());
  std::vector<iovec> out;
  for (std::size_t at = 0; at < source.size(); at += out.back().iov_len)
    out.push_back(piece(source, at, out.size() % 2 == 0 ? header_bytes : large_bytes));
  CHECK(pair.sender->try_send(out) == header_bytes);
  std::size_t received = 0;
  const auto take = [&](std::size_t bytes) {
    const iovec into[] = {piece(arrived, received, bytes), piece(arrived, received + bytes, header_bytes)};
    const std::size_t came = pair.receiver->try_recv(std::span(into).first(bytes < large_bytes ? 2 : 1));
    received += came;
    return came;
  };
  CHECK(take(header_bytes) == header_bytes);
  CHECK(take(large_bytes) == large_bytes);
  CmaRegion& region = pair.segment->ring(0).cma;
  region.token ^= 1;                              // a call would find another process
  CHECK(take(header_bytes / 4) == header_bytes);  // into both pieces, and nothing of what follows
  region.token ^= 1;
  CHECK(take(large_bytes) == large_bytes);
  CHECK(take(header_bytes) == header_bytes);
  CHECK(take(large_bytes) == large_bytes);
  CHECK(arrived == source);
}

// More small pieces than a region has room for, of all lengths up to twice what it copies.
void check_small_pieces() {
  Pair pair(CmaUse::always);
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::size_t> lengths{min_cma_bytes};
    while (lengths.size() + 1 < max_pieces) lengths.push_back(1 + random() % (2 * CmaRegion::max_copied_bytes));
    lengths.push_back(min_cma_bytes);
    auto source = pattern(std::accumulate(lengths.begin(), lengths.end(), std::size_t{0}), 12);
    std::vector<std::byte> arrived(source.size());
    std::vector<iovec> out;
    std::size_t at = 0;
    for (const std::size_t length : lengths) out.push_back(piece(source, std::exchange(at, at + length), length));
    CHECK(pair.sender->try_send(out) == 0);
    for (std::size_t received = 0, calls = 0; received < source.size() && calls < 1000; ++calls) {
      const std::size_t bytes = std::min<std::size_t>(1 + random() % (min_cma_bytes / 2), source.size() - received);
      const iovec into[] = {piece(arrived, received, bytes)};
      received += pair.receiver->try_recv(into);
    }
    CHECK(arrived == source);
    CHECK(pair.sender->try_send(out) == source.size());
  }
}

// What lies outside of what a region has room for is not read.
void check_corrupt_piece() {
  Pair pair(CmaUse::always);
  auto source = pattern(2 * large_bytes, 13);
  std::vector<std::byte> arrived(source.size());
  const iovec out[] = {piece(source, 0, large_bytes), piece(source, large_bytes, 10),
                       piece(source, large_bytes + 10, large_bytes - 10)};
  CHECK(pair.sender->try_send(out) == 0);
  CmaRegion& region = pair.segment->ring(0).cma;
  region.pieces[1].base = std::uint64_t{0} - large_bytes + region.copies.size();
  const iovec first[] = {piece(arrived, 0, large_bytes)};
  CHECK(pair.receiver->try_recv(first) == large_bytes);
  const iovec second[] = {piece(arrived, large_bytes, 10)};
  CHECK(pair.receiver->try_recv(second) == 0);
  CHECK((region.state.load() & 3) == CmaRegion::refused);
}

// Who sleeps is woken: the receiver by a region, the sender by its end.
void check_doorbells() {
  Pair pair(CmaUse::always);
  auto source = pattern(2 * ring_bytes, 5);
  std::vector<std::byte> arrived(2 * ring_bytes);
  std::vector<pollfd> fds;
  CHECK(pair.receiver->prepare_wait(true, false, fds));
  const iovec all[] = {piece(source, 0, source.size())};
  CHECK(pair.sender->try_send(all) == 0);
  CHECK(pair.doorbells == 1);
  pair.receiver->finish_wait({}, {});
  const iovec first[] = {piece(arrived, 0, ring_bytes)};
  CHECK(pair.receiver->try_recv(first) == ring_bytes);
  CHECK(pair.sender->prepare_wait(false, true, fds));
  const iovec second[] = {piece(arrived, ring_bytes, ring_bytes)};
  CHECK(pair.receiver->try_recv(second) == ring_bytes);
  CHECK(pair.doorbells == 2);
  pair.sender->finish_wait({}, {});
  CHECK(arrived == source);
}

// A process that cannot be read, or is another one by now: the ring does it all.
void check_refusal(bool other_process) {
  Pair pair(CmaUse::always);
  CmaRegion& region = pair.segment->ring(0).cma;
  (other_process ? region.token : region.token_address) += 1 << 20;
  auto source = pattern(large_bytes, 6);
  std::vector<std::byte> arrived(large_bytes);
  std::size_t sent = 0, received = 0, idle = 0;
  while (received < large_bytes && ++idle < 1000) {
    const iovec out[] = {piece(source, sent, large_bytes - sent)};
    sent += sent < large_bytes ? pair.sender->try_send(out) : 0;
    const iovec in[] = {piece(arrived, received, large_bytes - received)};
    received += pair.receiver->try_recv(in);
  }
  CHECK(arrived == source);
  CHECK(pair.sender->cma_use() == CmaUse::never);
}

// A sender that gave up may have let go of its memory: what is read there is not handed on.
void check_abort() {
  Pair pair(CmaUse::always);
  auto source = pattern(large_bytes, 7);
  std::vector<std::byte> arrived(large_bytes);
  const iovec out[] = {piece(source, 0, large_bytes)};
  CHECK(pair.sender->try_send(out) == 0);
  pair.sender->shutdown();
  const iovec in[] = {piece(arrived, 0, large_bytes)};
  bool is_closed = false;
  try {
    pair.receiver->try_recv(in);
  } catch (const StreamClosed& closed) {
    is_closed = closed.peer == 0;
  }
  CHECK(is_closed);
  CHECK(pair.receiver->received_bytes() == 0);
}

// What is in a shared buffer is read where it is; once more where it was not consumed.
void check_in_place(bool bypass_cache) {
  Pair pair(CmaUse::measured);
  pair.receiver->set_way(std::nullopt, bypass_cache);
  pair.sender->set_way(CopyWay::in_place, false);
  SharedBuffer shared(large_bytes);
  std::ranges::copy(pattern(large_bytes, 8), shared.data());
  const iovec out[] = {{shared.data(), large_bytes}};
  CHECK(pair.sender->try_send(out) == 0);
  CHECK(would_sleep(*pair.sender, false, true));  // it stays there until the receiver comes, however late
  const std::byte* data = pair.receiver->try_peek(1000);
  CHECK(data && std::memcmp(data, shared.data(), 1000) == 0);
  CHECK(pair.receiver->try_peek(1000) == data);
  shared.data()[999] ^= std::byte{1};  // no copy: what is written here is seen there
  CHECK(data && data[999] == shared.data()[999]);
  CHECK(would_sleep(*pair.sender, false, true));  // the receiver is at it: it is not withdrawn
  pair.receiver->consume(1000);
  std::vector<std::byte> rest(large_bytes - 1000);
  for (std::size_t received = 0, calls = 0; received < rest.size() && calls < 100; ++calls) {
    const iovec into[] = {piece(rest, received, rest.size() - received)};
    received += pair.receiver->try_recv(into);
  }
  CHECK(std::memcmp(rest.data(), shared.data() + 1000, rest.size()) == 0);
  CHECK(pair.sender->try_send(out) == large_bytes);
}

// A peer that cannot map a buffer gets it through the ring, and ordinary memory as ever.
void check_in_place_refusal() {
  Pair pair(CmaUse::always);
  pair.sender->set_way(CopyWay::in_place, false);
  SharedBuffer shared(large_bytes);
  std::ranges::copy(pattern(large_bytes, 9), shared.data());
  CHECK(!pair.sender->was_refused_in_place());
  std::vector<std::byte> arrived(large_bytes);
  std::size_t sent = 0, received = 0, idle = 0;
  while (received < large_bytes && ++idle < 1000) {
    const iovec out[] = {{shared.data() + sent, large_bytes - sent}};
    sent += sent < large_bytes ? pair.sender->try_send(out) : 0;
    if (idle == 1) pair.segment->ring(0).cma.place.id += 2;  // of another one, that is gone
    const iovec in[] = {piece(arrived, received, large_bytes - received)};
    received += pair.receiver->try_recv(in);
  }
  CHECK(std::memcmp(arrived.data(), shared.data(), large_bytes) == 0);
  CHECK(pair.sender->was_refused_in_place());
  CHECK(!pair.sender->was_refused_in_place());  // since it was asked last
  CHECK(pair.sender->may_read_in_place());
  CHECK(pair.sender->cma_use() == CmaUse::always);
}

void check_held_abort() {
  Pair pair(CmaUse::always);
  pair.sender->set_way(CopyWay::in_place, false);
  SharedBuffer shared(large_bytes);
  const iovec out[] = {{shared.data(), large_bytes}};
  CHECK(pair.sender->try_send(out) == 0);
  CHECK(pair.receiver->try_peek(1000) != nullptr);
  pair.sender->shutdown();
  bool is_closed = false;
  try {
    pair.receiver->consume(1000);
  } catch (const StreamClosed& closed) {
    is_closed = closed.peer == 0;
  }
  CHECK(is_closed);
}

// Messages of a batch, in memory here and there, with little ones in between: up to max_pieces of them are listed in a
// call, some have gone before the next one, and the sender goes to sleep now and then.
void check_scattered(CmaUse cma, CmaUse receiver_cma, unsigned seed) {
  Pair pair(cma, receiver_cma);
  std::mt19937 random(seed);
  std::vector<std::vector<std::byte>> messages;
  std::vector<std::byte> source;
  for (unsigned i = 0; i < 60; ++i) {
    const std::size_t bytes = random() % 3 == 0 ? 1 + random() % 100 : 100'000 + random() % 400'000;
    messages.push_back(pattern(bytes, 1000 * seed + i));
    source.insert(source.end(), messages.back().begin(), messages.back().end());
  }
  std::vector<std::byte> arrived(source.size());
  std::size_t next = 0, done = 0, received = 0, idle = 0;
  while ((received < source.size() || next < messages.size()) && ++idle < 10'000) {
    std::vector<iovec> out;
    for (std::size_t i = next; i < messages.size() && out.size() < 1 + random() % max_pieces; ++i)
      out.push_back(piece(messages[i], i == next ? done : 0, messages[i].size() - (i == next ? done : 0)));
    std::size_t bytes = out.empty() ? 0 : pair.sender->try_send(out);
    while (bytes > 0) {
      const std::size_t of_it = std::min(bytes, messages[next].size() - done);
      bytes -= of_it;
      done += of_it;
      if (done < messages[next].size()) break;
      std::ranges::fill(messages[next], std::byte{0xee});  // its memory is the caller's again
      ++next;
      done = 0;
    }
    if (random() % 4 == 0) would_sleep(*pair.sender, false, true);
    for (unsigned i = random() % 3; i > 0 && received < source.size(); --i) {
      const std::size_t most = std::min<std::size_t>(source.size() - received, 1 + random() % 300'000);
      const std::size_t first = random() % (most + 1);
      const iovec in[] = {piece(arrived, received, first), piece(arrived, received + first, most - first)};
      received += pair.receiver->try_recv(in);
    }
  }
  CHECK(next == messages.size());
  CHECK(arrived == source);
}

// What is listed together is received though its sender does nothing any more, but for what the region may hold.
void check_batch_without_sender() {
  Pair pair(CmaUse::always);
  constexpr std::size_t bytes = 200'000;
  std::vector<std::vector<std::byte>> messages;
  std::vector<iovec> out;
  for (unsigned i = 0; i < max_pieces; ++i) messages.push_back(pattern(i % 2 == 0 ? 32 : bytes, i));
  for (auto& message : messages) out.push_back(piece(message, 0, message.size()));
  const std::size_t in_ring = pair.sender->try_send(out);
  CHECK(in_ring == 32);
  std::size_t received = 0;
  std::vector<std::byte> arrived(max_pieces / 2 * (32 + bytes));
  for (int i = 0; i < 100 && received < arrived.size(); ++i) {
    const iovec in[] = {piece(arrived, received, arrived.size() - received)};
    received += pair.receiver->try_recv(in);
  }
  CHECK(received == arrived.size());
  std::size_t at = 0;
  for (const auto& message : messages) {
    CHECK(std::equal(message.begin(), message.end(), arrived.begin() + static_cast<std::ptrdiff_t>(at)));
    at += message.size();
  }
}

// What every communicator has: whole pages, and where few ranks share the room, more than an L2 of 1 MiB.
void check_ring_sizes() {
  for (int size = 1; size <= 200; ++size) {
    const ShmSegment::RingBytes bytes = ShmSegment::ring_bytes_for(size);
    for (const std::size_t each : {bytes.collective, bytes.p2p})
      CHECK(each % (64 * 1024) == 0 && each >= 64 * 1024 && each <= 3 << 19);
    CHECK(size <= 6 ? bytes.p2p > 1 << 20 : bytes.p2p <= 1 << 20);
    CHECK(size <= 2 ? bytes.collective > 1 << 20 : bytes.collective <= 1 << 20);
  }
}

// Rings of collectives and of messages, of different sizes: each is twice in memory, and beside all others.
void check_rings() {
  constexpr std::size_t page = 4096;
  for (const ShmSegment::RingBytes bytes :
       {ShmSegment::RingBytes{page, 4 * page}, ShmSegment::RingBytes{4 * page, page}}) {
    const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
    CHECK(::ftruncate(fd.get(), static_cast<off_t>(ShmSegment::segment_bytes(bytes))) == 0);
    const ShmSegment segment(fd.get(), bytes), peer(fd.get(), bytes);
    for (int ring = 0; ring < 4; ++ring) {
      CHECK(segment.ring_bytes(ring) == (ring < 2 ? bytes.collective : bytes.p2p));
      std::fill_n(segment.data(ring) + segment.ring_bytes(ring), segment.ring_bytes(ring),
                  static_cast<std::byte>(ring + 1));
    }
    const std::byte* head = reinterpret_cast<const std::byte*>(&segment.ring(0));
    CHECK(std::all_of(head, head + page_bytes(), [](std::byte byte) { return byte == std::byte{0}; }));
    for (int ring = 0; ring < 4; ++ring)
      CHECK(std::all_of(peer.data(ring), peer.data(ring) + 2 * peer.ring_bytes(ring),
                        [&](std::byte byte) { return byte == static_cast<std::byte>(ring + 1); }));
  }
}

}  // namespace

int main() {
  auto source = pattern(stream_bytes, 1);
  SharedBuffer shared(stream_bytes);
  std::ranges::copy(source, shared.data());
  for (const CmaUse cma : {CmaUse::never, CmaUse::measured, CmaUse::always}) check_stream(cma, cma, source);
  check_stream(CmaUse::always, CmaUse::never, source);
  for (const CmaUse cma : {CmaUse::never, CmaUse::always})  // no power of two
    check_stream(cma, cma, source, {}, ring_bytes - 4096);
  const std::span<std::byte> shared_data(shared.data(), shared.bytes());
  for (const CmaUse receiver_cma : {CmaUse::never, CmaUse::measured, CmaUse::always})
    check_stream(CmaUse::measured, receiver_cma, shared_data, CopyWay::in_place);
  for (const CmaUse cma : {CmaUse::never, CmaUse::measured, CmaUse::always})
    for (unsigned seed = 1; seed <= 5; ++seed) check_scattered(cma, cma, seed);
  for (unsigned seed = 6; seed <= 8; ++seed) check_scattered(CmaUse::always, CmaUse::never, seed);
  check_rings();
  check_ring_sizes();
  check_batch_without_sender();
  check_in_place(/*bypass_cache=*/false);
  check_in_place(/*bypass_cache=*/true);
  check_in_place_refusal();
  check_held_abort();
  check_completion();
  check_withdrawal();
  check_patience();
  check_end_before_sleep();
  check_copied_pieces();
  check_small_pieces();
  check_corrupt_piece();
  check_doorbells();
  check_refusal(/*other_process=*/false);
  check_refusal(/*other_process=*/true);
  check_abort();
  return result("test_cma");
}
