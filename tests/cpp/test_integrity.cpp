// CRC32C, and the channel that compares by it: every bit that changes on its way is found, on sockets and in shared
// memory, before the last byte of what it was in is given on; and a communicator says on which host and NIC.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "check.hpp"
#include "holmes/comm/communicator.hpp"
#include "holmes/core/crc32c.hpp"
#include "holmes/core/error.hpp"
#include "holmes/transport/checked_channel.hpp"
#include "holmes/transport/rails_channel.hpp"
#include "holmes/transport/shm/shm_channel.hpp"
#include "holmes/transport/tcp_channel.hpp"
#include "rail_sockets.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

// Of all direct copies of this process.
std::atomic<std::uint64_t> direct_copies{0};
constexpr std::int64_t no_flip = -1;
std::atomic<std::int64_t> bits_to_flip{no_flip};  // so many bits further on one is flipped
std::mutex flipping;                              // one copy at a time counts them down

}  // namespace

// In place of the C library's: counts, and flips a bit of what a direct copy brings. The last piece is a token, which
// says whose memory it is.
ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long local_count, const iovec* remote,
                         unsigned long remote_count, unsigned long flags) noexcept {
  const ssize_t got = ::syscall(SYS_process_vm_readv, pid, local, local_count, remote, remote_count, flags);
  ++direct_copies;
  const std::lock_guard lock(flipping);
  for (unsigned long i = 0; i + 1 < local_count; ++i) {
    const auto bits = static_cast<std::int64_t>(8 * local[i].iov_len);
    if (const std::int64_t bit = bits_to_flip; bit >= 0 && bit < bits) {
      static_cast<std::byte*>(local[i].iov_base)[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      bits_to_flip = no_flip;
    } else if (bit >= 0) {
      bits_to_flip = bit - bits;
    }
  }
  return got;
}

namespace {

// Random bytes, drawn once for all: each byte anew takes the thread sanitizer longer than what is tested.
std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  static const std::vector<std::byte> drawn = [] {
    std::mt19937 random(1);
    std::vector<std::byte> values(1 << 20);
    for (std::byte& value : values) value = static_cast<std::byte>(random());
    return values;
  }();
  const std::size_t from = seed * std::size_t{7919} % drawn.size();
  std::vector<std::byte> data(bytes);
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t at = (from + done) % drawn.size();
    const std::size_t now = std::min(bytes - done, drawn.size() - at);
    std::memcpy(data.data() + done, drawn.data() + at, now);
    done += now;
  }
  return data;
}

void check_crc() {
  const char text[] = "123456789";  // RFC 3720's and everybody's
  CHECK(crc32c(0, reinterpret_cast<const std::byte*>(text), 9) == 0xe3069283);
  const std::vector<std::byte> zeros(32);
  CHECK(crc32c(0, zeros.data(), zeros.size()) == 0x8a9136aa);  // RFC 3720, B.4
  const auto data = pattern(100'000, 1);
  std::mt19937 random(2);
  for (int i = 0; i < 300; ++i) {
    const std::size_t begin = random() % 64;
    const std::size_t bytes = random() % (i < 150 ? 64 : data.size() - begin);
    const std::size_t first = bytes == 0 ? 0 : random() % bytes;
    const std::byte* from = data.data() + begin;
    const std::uint32_t whole = crc32c(0, from, bytes);
    CHECK(whole == crc32c_by_table(0, from, bytes));
    CHECK(whole == crc32c(crc32c(0, from, first), from + first, bytes - first));
  }
}

// Two ends of a stream, and what lies between them: `carry` moves what is under way and changes the bit `flip` of
// the first connection that gets so far. Absent: none.
struct Ends {
  std::unique_ptr<Channel> sender, receiver;
  std::function<void()> carry = [] {};
  bool has_flipped = false;
  std::shared_ptr<ShmSegment> segment;  // of shared memory
};

// Connections through the test's hands.
struct Wire {
  explicit Wire(UniqueFd from, UniqueFd to, std::optional<std::uint64_t> flip)
      : from_(std::move(from)), to_(std::move(to)), flip_(flip) {}
  void carry(bool& has_flipped) {
    if (const ssize_t got = ::recv(from_.get(), buffer_.data() + held_, buffer_.size() - held_, MSG_DONTWAIT);
        got > 0) {
      const std::uint64_t end = position_ + static_cast<std::uint64_t>(got);
      if (flip_ && !has_flipped && *flip_ / 8 >= position_ && *flip_ / 8 < end) {
        buffer_[held_ + *flip_ / 8 - position_] ^= static_cast<std::byte>(1 << *flip_ % 8);
        has_flipped = true;
      }
      position_ = end;
      held_ += static_cast<std::size_t>(got);
    }
    if (held_ == 0) return;
    const ssize_t sent = ::send(to_.get(), buffer_.data(), held_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent <= 0) return;
    held_ -= static_cast<std::size_t>(sent);
    std::memmove(buffer_.data(), buffer_.data() + sent, held_);
  }

private:
  UniqueFd from_, to_;
  std::optional<std::uint64_t> flip_;
  std::uint64_t position_ = 0;
  std::size_t held_ = 0;
  std::array<std::byte, 65536> buffer_;
};

std::unique_ptr<Channel> tcp_channel(int peer, std::vector<Connection> sockets) {
  if (sockets.size() == 1) return std::make_unique<TcpChannel>(peer, std::move(sockets.front()));
  return std::make_unique<RailsChannel>(peer, std::move(sockets), std::make_shared<RailsContext>());
}

std::unique_ptr<Ends> tcp_ends(int rails, std::optional<std::uint64_t> flip) {
  auto ends = std::make_unique<Ends>();
  auto wires = std::make_shared<std::vector<std::unique_ptr<Wire>>>();
  std::vector<Connection> left, right;
  for (int rail = 0; rail < rails; ++rail) {
    auto [sender, from] = tcp_pair();
    auto [to, receiver] = tcp_pair();
    left.push_back(mesh_socket(std::move(sender), rail));
    right.push_back(mesh_socket(std::move(receiver), rail));
    wires->push_back(std::make_unique<Wire>(std::move(from), std::move(to), flip));
  }
  ends->sender = tcp_channel(1, std::move(left));
  ends->receiver = tcp_channel(0, std::move(right));
  ends->carry = [wires, &flipped = ends->has_flipped] {
    for (auto& wire : *wires) wire->carry(flipped);
  };
  return ends;
}

// What is in the ring lies there until it is received.
std::unique_ptr<Ends> shm_ends(CmaUse cma, std::optional<std::uint64_t> flip) {
  auto ends = std::make_unique<Ends>();
  constexpr ShmSegment::RingBytes bytes{128 * 1024, 64 * 1024};
  const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  CHECK(::ftruncate(fd.get(), static_cast<off_t>(ShmSegment::segment_bytes(bytes))) == 0);
  const auto segment = ends->segment = std::make_shared<ShmSegment>(fd.get(), bytes);
  ConnectionInfo info;
  info.transport = "shm";
  ends->sender = std::make_unique<ShmChannel>(1, segment, 0, 1, [] {}, cma, info);
  ends->receiver = std::make_unique<ShmChannel>(0, segment, 1, 0, [] {}, cma, info);
  ends->carry = [segment, flip, &flipped = ends->has_flipped] {
    const std::uint64_t produced = segment->ring(0).line.produced(std::memory_order_seq_cst),
                        consumed = segment->ring(0).consumed.load();
    if (!flip || flipped || *flip / 8 < consumed || *flip / 8 >= produced) return;
    segment->data(0)[*flip / 8 % segment->ring_bytes(0)] ^= static_cast<std::byte>(1 << *flip % 8);
    flipped = true;
  };
  return ends;
}

constexpr int kinds = 4;
std::unique_ptr<Ends> checked_ends(int kind, std::optional<std::uint64_t> flip) {
  auto ends = kind < 2    ? tcp_ends(kind + 1, flip)
              : kind == 2 ? shm_ends(CmaUse::never, flip)
                          : shm_ends(CmaUse::always, flip);
  ends->sender = std::make_unique<CheckedChannel>(std::move(ends->sender), "dp0", "rank 0 (host a)", 1);
  ends->receiver = std::make_unique<CheckedChannel>(std::move(ends->receiver), "dp0", "rank 1 (host b)", 0);
  return ends;
}

// Messages of all sizes from `least` on, each in two pieces, all of them right.
void transfer(Ends& ends, std::size_t total, unsigned seed, std::size_t least = 1) {
  auto source = pattern(total, seed);
  std::vector<std::byte> arrived(total);
  std::mt19937 random(seed + 1);
  std::size_t begin = 0;
  const auto end_of_time = Clock::now() + 20s;
  while (begin < total) {
    const std::size_t longest = std::size_t{1} << (4 + random() % 16);  // drawn first: operands have no order in C++
    const std::size_t bytes = std::min<std::size_t>(total - begin, std::max(least, 1 + random() % longest));
    const std::size_t cut = random() % bytes;
    std::size_t sent = 0, received = 0;
    while (sent < bytes || received < bytes) {
      if (Clock::now() > end_of_time) throw std::runtime_error("nothing arrives any more");
      const auto rest = [&](std::vector<std::byte>& data, std::size_t done) {
        std::vector<iovec> pieces;
        if (done < cut) pieces.push_back({data.data() + begin + done, cut - done});
        pieces.push_back({data.data() + begin + std::max(cut, done), bytes - std::max(cut, done)});
        return pieces;
      };
      if (sent < bytes) sent += ends.sender->try_send(rest(source, sent));
      ends.sender->maintain(Clock::now());
      ends.carry();
      if (received < bytes) received += ends.receiver->try_recv(rest(arrived, received));
    }
    CHECK(std::memcmp(arrived.data() + begin, source.data() + begin, bytes) == 0);  // before anybody uses the message
    begin += bytes;
  }
}

void check_unchanged() {
  for (int kind = 0; kind < kinds; ++kind) {
    const auto ends = checked_ends(kind, std::nullopt);
    constexpr std::size_t total = 8 << 20;
    transfer(*ends, total, 3);
    CHECK(ends->sender->sent_bytes() == total && ends->receiver->received_bytes() == total);
  }
}

// In payload and headers, of frames and of rails.
void check_flips(int flips) {
  int changed = 0, found = 0;
  std::mt19937 random(4);
  for (int i = 0; i < flips; ++i) {
    constexpr std::size_t total = 200'000;
    const int kind = i % 3;
    const auto ends = checked_ends(kind, random() % (total / (kind == 1 ? 4 : 2) * 8));
    try {
      transfer(*ends, total, 5 + static_cast<unsigned>(i));
    } catch (const IntegrityError& error) {
      CHECK(error.context().peer.has_value() && error.context().nic == (kind == 2 ? "shm" : "lo"));
      ++found;
    } catch (const ProtocolError&) {  // a rail's first word: as of another version
      CHECK(kind == 1);
      ++found;
    }
    changed += ends->has_flipped ? 1 : 0;
  }
  CHECK(changed >= flips * 9 / 10 && found == changed);
}

constexpr std::size_t operation_header_bytes = 64;

// One operation as collectives have them: a header, and payload in slices that are peeked at, of which at most
// `offered` bytes are offered at a time. Returns how many slices were shown where they lie in the ring.
int peek_at_operation(Ends& ends, std::span<std::byte> source, std::size_t slice_bytes,
                      const std::function<std::size_t()>& offered) {
  const std::byte* ring = ends.segment->data(0);
  std::array<std::byte, operation_header_bytes> header{};
  std::size_t sent = 0, received = 0;
  int in_place = 0;
  bool is_right = true;
  const auto end_of_time = Clock::now() + 20s;
  while (received < source.size()) {
    if (Clock::now() > end_of_time) throw std::runtime_error("nothing arrives any more");
    std::vector<iovec> pieces;
    if (sent < operation_header_bytes) pieces.push_back({source.data() + sent, operation_header_bytes - sent});
    const std::size_t begin = std::max(sent, operation_header_bytes);
    pieces.push_back({source.data() + begin, std::min(source.size() - begin, offered())});
    sent += ends.sender->try_send(pieces);
    ends.carry();
    if (received < operation_header_bytes) {
      const iovec rest{header.data() + received, operation_header_bytes - received};
      received += ends.receiver->try_recv({&rest, 1});
      continue;
    }
    const std::size_t bytes = std::min(slice_bytes, source.size() - received);
    const std::byte* shown = ends.receiver->try_peek(bytes);
    if (shown == nullptr) continue;
    is_right &= std::memcmp(shown, source.data() + received, bytes) == 0;
    in_place += shown >= ring && shown < ring + 2 * ends.segment->ring_bytes(0) ? 1 : 0;
    ends.receiver->consume(bytes);
    received += bytes;
  }
  CHECK(is_right && std::memcmp(header.data(), source.data(), header.size()) == 0);
  return in_place;
}

// Slices that are a frame, more or less than one, or cross the ends of frames, of operations whose payload is offered
// as a whole or bit by bit.
void peek_at_all(Ends& ends, unsigned seed) {
  std::mt19937 random(seed);
  for (int operation = 0; operation < 40; ++operation) {
    auto source = pattern(operation_header_bytes + 1 + random() % 600'000, seed + static_cast<unsigned>(operation));
    const std::size_t slice_bytes = std::min<std::size_t>(1 + random() % 65536, 64 * (1 + random() % 1024));
    const bool is_whole = random() % 2 == 0;
    peek_at_operation(ends, source, slice_bytes, [&] { return is_whole ? source.size() : random() % 70'000; });
    transfer(ends, 1 + random() % 100'000, seed);  // nothing is left of it
  }
}

void check_peeks(int flips) {
  for (const int kind : {2, 3}) peek_at_all(*checked_ends(kind, std::nullopt), 8);
  // Slices as collectives have them lie in the ring: no copy.
  constexpr std::size_t slice_bytes = 65536;
  for (const std::size_t slices : {1, 2, 9}) {
    const auto ends = checked_ends(2, std::nullopt);
    auto source = pattern(operation_header_bytes + slices * slice_bytes, 9);
    for (int repeat = 0; repeat < 3; ++repeat)
      CHECK(peek_at_operation(*ends, source, slice_bytes, [&] { return source.size(); }) == static_cast<int>(slices));
  }
  int changed = 0, found = 0;
  std::mt19937 random(10);
  for (int i = 0; i < flips; ++i) {
    const auto ends = checked_ends(2, random() % (8 * 1'000'000));
    try {
      peek_at_all(*ends, static_cast<unsigned>(i));
    } catch (const IntegrityError& error) {
      CHECK(error.context().peer.has_value() && error.context().nic == "shm");
      ++found;
    }
    changed += ends->has_flipped ? 1 : 0;
  }
  CHECK(changed >= flips * 9 / 10 && found == changed);
}

// In what is copied directly out of the sender's memory.
void check_direct_flips(int flips) {
  int changed = 0, found = 0;
  std::mt19937 random(6);
  for (int i = 0; i < flips; ++i) {
    constexpr std::size_t total = 400'000;
    const auto ends = checked_ends(3, std::nullopt);
    bits_to_flip = static_cast<std::int64_t>(random() % (total / 2 * 8));
    try {
      transfer(*ends, total, 7 + static_cast<unsigned>(i), total);
    } catch (const IntegrityError& error) {
      CHECK(error.context().peer.has_value() && error.context().nic == "shm");
      ++found;
    }
    changed += bits_to_flip.exchange(no_flip) == no_flip ? 1 : 0;
  }
  CHECK(changed >= flips * 9 / 10 && found == changed);
}

// How many direct copies two ranks of this host make in `body`, with integrity on. With `errors` each one's failure is
// what is expected.
std::uint64_t direct_copies_of(const std::function<void(Communicator&)>& body,
                               std::array<std::string, 2>* errors = nullptr) {
  const auto store = make_local_store();
  const std::uint64_t before = direct_copies;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      CommunicatorOptions options{.rank = rank, .size = 2, .transport = Transport::shm, .timeout = 20s};
      options.integrity = true;
      const auto comm = make_communicator(store, options);
      try {
        body(*comm);
        CHECK(errors == nullptr);
      } catch (const IntegrityError& error) {
        CHECK(errors != nullptr);
        if (errors != nullptr) (*errors)[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (auto& rank : ranks) rank.join();
  return direct_copies - before;
}

constexpr std::size_t large_count = 2 << 20;

void collectives_of(Communicator& comm) {
  std::vector<float> data(large_count, 1), all(2 * large_count);
  const auto part = [](std::vector<float>& values, std::size_t begin, std::size_t count) {
    return Buffer{values.data() + begin, count, DType::float32, nullptr};
  };
  for (int i = 0; i < 3; ++i) {
    comm.all_reduce(part(data, 0, large_count), ReduceOp::max, {})->wait();
    comm.broadcast(part(data, 0, large_count), 0, {})->wait();
    comm.all_gather({part(all, 0, large_count), part(all, large_count, large_count)}, part(data, 0, large_count), {})
        ->wait();
  }
  CHECK(data.front() == 1 && data.back() == 1 && all.front() == 1 && all.back() == 1);
}

void message_of_ranks(Communicator& comm) {
  std::vector<float> data(large_count, static_cast<float>(comm.rank()));
  const Buffer buffer{data.data(), data.size(), DType::float32, nullptr};
  (comm.rank() == 0 ? comm.send(buffer, 1, 0, {}) : comm.recv(buffer, 0, 0, {}))->wait();
  comm.barrier();
  CHECK(data.front() == 0 && data.back() == 0);
}

// Collectives and messages may copy directly with integrity on too: what such a copy brings is compared with what was
// sent, and one flipped bit of it fails both ranks.
void check_direct_copies_of_communicators() {
  ::setenv("HOLMES_CMA", "always", 1);
  // A sender that goes to sleep withdraws what it showed, and sends it through the ring: none is to sleep here, on
  // however slow a machine.
  ::setenv("HOLMES_SPIN_US", "1000000", 1);
  for (const auto& body : {collectives_of, message_of_ranks}) {
    CHECK(direct_copies_of(body) > 0);
    std::array<std::string, 2> errors;
    bits_to_flip = 1'000'000;
    direct_copies_of(body, &errors);
    CHECK(bits_to_flip.exchange(no_flip) == no_flip);
    for (const auto& error : errors) CHECK(contains(error, "does not have the CRC32C that it was sent with"));
  }
  ::setenv("HOLMES_CMA", "0", 1);
  CHECK(direct_copies_of(collectives_of) == 0);
  ::unsetenv("HOLMES_CMA");
  ::unsetenv("HOLMES_SPIN_US");
}

void check_words() {
  const auto ends = checked_ends(0, 100 * 8);  // in the first message
  const std::string message = message_of<IntegrityError>([&] { transfer(*ends, 4000, 1); });
  CHECK(contains(message, "communicator 'dp0': what rank 1 (host b) received from rank 0"));
  CHECK(contains(message, "on NIC lo has changed on its way: "));
  CHECK(contains(message, " bytes (frame 0) does not have the CRC32C that it was sent with"));
}

// Two ranks that differ are told.
void check_agreement() {
  const auto store = make_local_store();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      CommunicatorOptions options;
      options.rank = rank;
      options.size = 2;
      options.integrity = rank == 1;
      options.connect_timeout = 20s;
      const std::string message = message_of<UsageError>([&] { make_communicator(store, options); });
      CHECK(contains(message, "only one of them checks integrity; give every rank the same integrity"));
    });
  for (auto& rank : ranks) rank.join();
}

}  // namespace

int main() {
  check_crc();
  check_unchanged();
  check_flips(1000);
  check_peeks(100);
  check_direct_flips(1000);
  check_direct_copies_of_communicators();
  check_words();
  check_agreement();
  return test::result("test_integrity");
}
