// Messages of a GPU's memory over RDMA, on the stand-ins for CUDA and libibverbs: who copies what, what is registered
// and how long, and what is said where it cannot be. The stand-ins end the process where a slot of page-locked memory
// is filled, emptied or freed that an HCA still uses.
#include <sys/resource.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <filesystem>
#include <tuple>

#include "holmes/core/error.hpp"
#include "holmes/cuda/device.hpp"
#include "rdma_checks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr std::size_t ring_bytes = 512 * 1024;  // those of two ranks are a quarter of 8 MiB
constexpr std::size_t slot_bytes = ring_bytes / 8;

// Of a fake GPU, which is host memory, or the host's.
Buffer memory(int device, std::size_t count, bool is_of_gpu) {
  if (!is_of_gpu) {
    const auto own = std::make_shared<Bytes>(count);
    return {own->data(), count, DType::uint8, own};
  }
  const cuda::Driver& cuda = cuda::driver();
  const cuda::CurrentDevice current(cuda::Device::get(device));
  cuda::Address address = 0;
  CHECK(cuda.memory_allocate(&address, std::max<std::size_t>(count, 1)) == cuda::success);
  auto* const begin = reinterpret_cast<void*>(address);
  Buffer buffer{begin, count, DType::uint8, std::shared_ptr<void>(begin, [](void* used) {
                  cuda::driver().memory_free(reinterpret_cast<cuda::Address>(used));
                })};
  buffer.device = device;
  return buffer;
}

bool holds(const Buffer& buffer, std::size_t number) {
  return buffer.count == 0 || std::memcmp(buffer.begin(), message(buffer.count, number).data(), buffer.count) == 0;
}

struct Ends {
  bool from_gpu = true;
  bool to_gpu = true;
};

// Messages of these sizes, both ways at once, each in memory of its own.
void exchange(Communicator& comm, const std::vector<std::size_t>& sizes, Ends ends = {}) {
  const int peer = 1 - comm.rank();
  const auto own = static_cast<std::size_t>(comm.rank());
  std::vector<WorkPtr> works;
  std::vector<Buffer> received;
  for (std::uint32_t tag = 0; tag < sizes.size(); ++tag) {
    received.push_back(memory(comm.rank(), sizes[tag], ends.to_gpu));
    works.push_back(comm.recv(received.back(), peer, tag, {.async = true}));
  }
  comm.barrier({})->wait();
  for (std::uint32_t tag = 0; tag < sizes.size(); ++tag) {
    const Buffer sent = memory(comm.rank(), sizes[tag], ends.from_gpu);
    fill_message(static_cast<std::uint8_t*>(sent.data), sizes[tag], 2 * tag + own);
    works.push_back(comm.send(sent, peer, tag, {.async = true}));
  }
  for (const WorkPtr& work : works) work->wait();
  for (std::size_t tag = 0; tag < sizes.size(); ++tag) CHECK(holds(received[tag], 2 * tag + 1 - own));
}

// Bytes of page-locked memory that HCAs took from where they were, and put where they are to be, while two ranks ran
// `body`.
std::tuple<long, long> moved_by_hcas(const std::function<void(Communicator&)>& body) {
  const long out = fake().pinned_out_bytes();
  const long in = fake().pinned_in_bytes();
  run_communicators(2, Transport::rdma, body);
  check_nothing_left();
  return {fake().pinned_out_bytes() - out, fake().pinned_in_bytes() - in};
}

bool has_locked_memory() {
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  return limit.rlim_cur >= 16 * ring_bytes;
}

// From the GPU's copy engine to the HCA and back nothing is copied: every byte leaves the sender's slots, and gets into
// the receiver's, by an HCA.
void check_no_copies() {
  const std::vector<std::size_t> sizes{slot_bytes, 2 * slot_bytes, 1 << 20, 3 << 20};
  long bytes = 0;  // of both ranks
  for (const std::size_t size : sizes) bytes += 2 * static_cast<long>(size);
  for (const long delay_us : {0L, 300L}) {
    fake().set("delay_us", delay_us);
    const auto [out, in] = moved_by_hcas([&](Communicator& comm) { exchange(comm, sizes); });
    std::fprintf(stderr, "of %ld bytes HCAs took %ld from page-locked memory and put %ld into it\n", bytes, out, in);
    CHECK(out == bytes && in == bytes);
  }
  fake().set("delay_us", 0);
  // One end is host memory: what the GPU's side does is the same.
  const auto sent = moved_by_hcas([&](Communicator& comm) { exchange(comm, sizes, {.to_gpu = false}); });
  CHECK(sent == std::tuple(bytes, 0L));
  const std::vector<std::size_t> large{1 << 20, 3 << 20};
  const auto received = moved_by_hcas([&](Communicator& comm) { exchange(comm, large, {.from_gpu = false}); });
  CHECK(received == std::tuple(0L, 8L << 20));
}

// A ring is registered once, whatever goes through it, and no longer than it lives.
void check_registered_once() {
  std::barrier both(2);
  moved_by_hcas([&](Communicator& comm) {
    both.arrive_and_wait();
    const long bytes = fake().registered_bytes();
    both.arrive_and_wait();
    exchange(comm, {1 << 20});
    both.arrive_and_wait();
    const long before = fake().registrations();
    CHECK(fake().registered_bytes() == bytes + 4 * static_cast<long>(ring_bytes));
    both.arrive_and_wait();
    for (int i = 0; i < 3; ++i) exchange(comm, {1 << 20, slot_bytes, 100});
    both.arrive_and_wait();
    CHECK(fake().registrations() == before);
    both.arrive_and_wait();
  });
  CHECK(fake().registered_bytes() == 0);
}

// All sizes, with completions late and in any order, and the slots' next use waiting for them.
void check_sizes() {
  const std::vector<std::size_t> sizes{
      0, 1, 100, slot_bytes - 1, slot_bytes + 1, ring_bytes + 77, slot_bytes, 3000000, 5 * ring_bytes};
  fake().set("hostile", 1);
  for (const long seed : {1L, 2L, 3L}) {
    fake().set("seed", seed);
    fake().set("delay_us", seed * 400);
    for (const Ends ends : {Ends{}, Ends{.to_gpu = false}, Ends{.from_gpu = false}})
      moved_by_hcas([&](Communicator& comm) { exchange(comm, sizes, ends); });
  }
  fake().set("delay_us", 0);
  fake().set("hostile", 0);
}

// What comes before its receive goes by the ring, which the sender's HCA fills from the slots all the same.
void check_unexpected() {
  const auto [out, in] = moved_by_hcas([&](Communicator& comm) {
    const Buffer data = memory(comm.rank(), 1 << 20, true);
    const Buffer other = memory(comm.rank(), 10, true);
    if (comm.rank() == 0) {
      fill_message(static_cast<std::uint8_t*>(data.data), data.count, 5);
      fill_message(static_cast<std::uint8_t*>(other.data), other.count, 6);
      const auto sending = comm.send(data, 1, 1, {.async = true});
      comm.send(other, 1, 2, {})->wait();
      sending->wait();
    } else {
      comm.recv(other, 0, 2, {})->wait();  // takes up the other one
      comm.recv(data, 0, 1, {})->wait();
      CHECK(holds(data, 5) && holds(other, 6));
    }
  });
  CHECK(out == 1 << 20 && in == 0);
}

// The communicator ends at any time: slots are freed only when no HCA knows of them, and who has failed harms nobody.
void check_abort() {
  for (const auto& [aborting, pause] : {std::tuple(0, 1ms), std::tuple(0, 30ms), std::tuple(0, 60ms),
                                        std::tuple(1, 1ms), std::tuple(1, 30ms), std::tuple(1, 60ms)}) {
    fake().set("delay_us", 20000);
    const auto store = make_local_store();
    std::barrier both(2);
    run_ranks(2, [&](int rank) {
      const auto comm = make_communicator(store, options_of(rank, 2));
      std::vector<WorkPtr> works;
      for (std::uint32_t tag = 0; tag < 2; ++tag) {
        works.push_back(comm->recv(memory(rank, 2 << 20, true), 1 - rank, tag, {.async = true}));
        works.push_back(comm->send(memory(rank, 2 << 20, true), 1 - rank, tag, {.async = true}));
      }
      both.arrive_and_wait();
      std::this_thread::sleep_for(pause);
      if (rank == aborting) comm->abort("on purpose");
      for (const WorkPtr& work : works) {
        try {
          work->wait();
        } catch (const HolmesError&) {
        }
      }
    });
    check_nothing_left();
    CHECK(fake().registered_bytes() == 0);
  }
  fake().set("delay_us", 0);
}

// Any request may be lost. Who has its message all the same has all of it.
void check_loss(std::size_t bytes, long step) {
  fake().set("delay_us", 1000);
  for (long after = 0; after < 12; after += step) {
    const auto store = make_local_store();
    std::barrier both(2);
    run_ranks(2, [&](int rank) {
      const auto comm = make_communicator(store, options_of(rank, 2));
      comm->barrier({})->wait();
      both.arrive_and_wait();
      if (rank == 0) fake().set("fail_after", after);
      both.arrive_and_wait();
      bool is_lost = false;
      for (int round = 0; round < 4 && !is_lost; ++round) {
        const Buffer data = memory(rank, bytes, true);
        if (rank == 0) fill_message(static_cast<std::uint8_t*>(data.data), data.count, 3);
        try {
          if (rank == 0) comm->send(data, 1, 0, {.timeout = 20s})->wait();
          if (rank == 1) comm->recv(data, 0, 0, {.timeout = 20s})->wait();
          CHECK(holds(data, 3));
        } catch (const PeerLostError&) {
          is_lost = true;
        }
      }
      both.arrive_and_wait();
    });
    fake().set("fail_after", -1);
    check_nothing_left();
  }
  fake().set("delay_us", 0);
}

// One of two ports is lost at any request: the messages go on over the other one.
void check_lost_port(const std::vector<long>& requests) {
  ::setenv("HOLMES_PINNED_RING_BYTES", "262144", 1);  // each HCA has the rings
  fake().set("hostile", 1);
  for (const int kind : {0, 1, 2}) {
    for (const long after : requests) {
      fake().set("seed", after + kind);
      fake().set("delay_us", 200);
      const auto store = make_local_store();
      std::barrier both(2);
      run_ranks(2, [&](int rank) {
        CommunicatorOptions options = options_of(rank, 2);
        options.rdma_ports = {rank == 0 ? "fake0:1" : "fake1:1", rank == 0 ? "fake2:1" : "fake3:1"};
        const auto comm = make_communicator(store, options);
        exchange(*comm, {slot_bytes});
        both.arrive_and_wait();
        if (rank == 0) {
          fake().set("die_kind", kind);
          fake().set("die_device", after % 2);
          fake().set("die_after", after);
        }
        both.arrive_and_wait();
        for (int round = 0; round < 3; ++round) exchange(*comm, {1 << 20, slot_bytes + 5, 3 * slot_bytes});
        comm->barrier({})->wait();
      });
      fake().set("die_after", -1);
      fake().set("heal", 0);
      check_nothing_left();
    }
  }
  fake().set("delay_us", 0);
  fake().set("hostile", 0);
  ::setenv("HOLMES_PINNED_RING_BYTES", "524288", 1);
}

// Where rings may not be registered they are copied from, as before; said once, with the limit.
void check_limits() {
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  const rlimit low{4 * ring_bytes - 1, limit.rlim_max};  // a ring is more than a quarter of it
  CHECK(::setrlimit(RLIMIT_MEMLOCK, &low) == 0);
  const std::string told = told_by([] {
    const auto [out, in] = moved_by_hcas([](Communicator& comm) { exchange(comm, {slot_bytes, 1 << 20}); });
    CHECK(out == 0 && in == 0);
  });
  CHECK(::setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  for (const char* part : {"cannot register 524288 bytes", "HCA fake", "GPU", "may lock 2097151 bytes", "ulimit -l",
                           "a quarter", "HOLMES_PINNED_RING_BYTES"})
    check_contains(told, part);
  const auto first = told.find("cannot register");
  CHECK(told.find("cannot register", first + 1) == std::string::npos);
  // And where the HCA refuses them.
  std::barrier both(2);
  const auto [out, in] = moved_by_hcas([&](Communicator& comm) {
    both.arrive_and_wait();
    if (comm.rank() == 0) fake().set("memory_limit", fake().registered_bytes() + 1000);
    both.arrive_and_wait();
    exchange(comm, {slot_bytes, 1 << 20, 3000000});
    both.arrive_and_wait();
    if (comm.rank() == 0) fake().set("memory_limit", -1);
  });
  CHECK(out == 0 && in == 0);
  // And where the variable says so.
  ::setenv("HOLMES_RDMA_DIRECT_BYTES", "never", 1);
  const auto never = moved_by_hcas([](Communicator& comm) { exchange(comm, {slot_bytes, 1 << 20}); });
  CHECK(never == std::tuple(0L, 0L));
  ::unsetenv("HOLMES_RDMA_DIRECT_BYTES");
}

// --- GPUDirect ---

// As moved_by_hcas, of GPUs' memory.
std::tuple<long, long> moved_directly(const std::function<void(Communicator&)>& body) {
  const long out = fake().gpu_out_bytes();
  const long in = fake().gpu_in_bytes();
  run_communicators(2, Transport::rdma, body);
  check_nothing_left();
  CHECK(fake().registered_bytes() == 0);
  return {fake().gpu_out_bytes() - out, fake().gpu_in_bytes() - in};
}

void set_way(const char* way) {
  if (way)
    ::setenv("HOLMES_RDMA_GPUDIRECT", way, 1);
  else
    ::unsetenv("HOLMES_RDMA_GPUDIRECT");
}

// HCAs read and write the GPUs' memory; what is less than HOLMES_RDMA_DIRECT_BYTES goes through slots all the same.
void check_direct() {
  const std::vector<std::size_t> sizes{1 << 20, (9 << 20) + 77, slot_bytes, 3 << 20, 100};
  constexpr long large = 2 * ((1 << 20) + (9 << 20) + 77 + (3 << 20));
  for (const long delay_us : {0L, 300L}) {
    fake().set("delay_us", delay_us);
    const long out = fake().pinned_out_bytes();
    CHECK(moved_directly([&](Communicator& comm) { exchange(comm, sizes); }) == std::tuple(large, large));
    CHECK(fake().pinned_out_bytes() == out + 2 * static_cast<long>(slot_bytes));
  }
  fake().set("delay_us", 0);
  CHECK(moved_directly([&](Communicator& comm) { exchange(comm, sizes, {.to_gpu = false}); }) == std::tuple(large, 0L));
  CHECK(moved_directly([&](Communicator& comm) { exchange(comm, sizes, {.from_gpu = false}); }) ==
        std::tuple(0L, large));
}

// What a stream does before a message is before it, on both sides.
void check_direct_order() {
  void* const library = ::dlopen(std::getenv("HOLMES_CUDA_LIBRARY"), RTLD_NOW);
  CHECK(library != nullptr);
  auto* const keep_busy = reinterpret_cast<int (*)(void*, int)>(::dlsym(library, "fake_cuda_busy"));
  using Fill = int (*)(unsigned long long, unsigned char, std::size_t, void*);
  auto* const fill = reinterpret_cast<Fill>(::dlsym(library, "cuMemsetD8Async"));
  constexpr std::size_t bytes = 2 << 20;
  for (const int late : {0, 1}) {
    CHECK(moved_directly([&](Communicator& comm) {
            auto& device = cuda::Device::get(comm.rank());
            const cuda::CurrentDevice current(device);
            const cuda::Stream stream = device.make_stream();
            Buffer data = memory(comm.rank(), bytes, true);
            data.stream = stream;
            if (comm.rank() == late) keep_busy(stream, 100);
            CHECK(fill(reinterpret_cast<unsigned long long>(data.data), comm.rank() == 0 ? 7 : 9, bytes, stream) == 0);
            if (comm.rank() == 0) comm.send(data, 1, 0, {})->wait();
            if (comm.rank() == 1) comm.recv(data, 0, 0, {})->wait();
            CHECK(std::all_of(data.begin(), data.begin() + bytes, [](std::byte byte) { return byte == std::byte{7}; }));
          }) == std::tuple(static_cast<long>(bytes), static_cast<long>(bytes)));
  }
}

// What cannot be registered, on either side and in mid-message, goes through slots; what follows goes directly again.
void check_direct_refused() {
  std::atomic<bool> is_over{false};
  std::thread fickle([&] {
    for (long turn = 0; !is_over; ++turn) {
      fake().set("dmabuf", turn % 2);
      std::this_thread::sleep_for(std::chrono::microseconds(turn % 2 == 0 ? 300 : 700));
    }
  });
  for (const long seed : {1L, 2L}) {
    fake().set("seed", seed);
    fake().set("delay_us", seed * 100);
    moved_directly([&](Communicator& comm) { exchange(comm, {17 << 20, 1 << 20, 1000, 3 << 20}); });
  }
  is_over = true;
  fickle.join();
  fake().set("dmabuf", 0);
  CHECK(moved_directly([&](Communicator& comm) { exchange(comm, {3 << 20, 1 << 20}); }) == std::tuple(0L, 0L));
  fake().set("dmabuf", 1);
  fake().set("delay_us", 0);
  check_unexpected();
}

void check_direct_missing() {
  const auto told = [](const char* way, const char* lacking) {
    set_way(way);
    if (lacking) ::setenv("FAKE_CUDA_GPUDIRECT", lacking, 1);
    const auto store = make_local_store();
    std::string text;
    std::barrier made(2);  // or the error of one would end the making of the other
    run_ranks(2, [&](int rank) {
      const auto comm = make_communicator(store, options_of(rank, 2));
      const Buffer data = memory(rank, 1 << 20, true);
      made.arrive_and_wait();
      try {
        if (rank == 0) comm->send(data, 1, 0, {})->wait();
        if (rank == 1) comm->recv(data, 0, 0, {})->wait();
        CHECK(!"what is missing was not noticed");
      } catch (const HolmesError& error) {
        if (rank == 0) text = error.what();
      }
    });
    ::unsetenv("FAKE_CUDA_GPUDIRECT");
    check_nothing_left();
    return text;
  };
  const auto check = [](const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) check_contains(text, part);
  };
  check(told("dmabuf", "none"),
        {"HOLMES_RDMA_GPUDIRECT='dmabuf'", "GPU_DIRECT_RDMA_SUPPORTED is 0", "the memory of GPU ", "unset it"});
  check(told("dmabuf", "no_dmabuf"), {"HOLMES_RDMA_GPUDIRECT='dmabuf'", "DMA_BUF_SUPPORTED is 0", "say peermem"});
  check(told("dmabuf", "no_flush"), {"HOLMES_RDMA_GPUDIRECT='dmabuf'", "FLUSH_WRITES_OPTIONS is 0", "update"});
  check(told("peermem", nullptr), {"HOLMES_RDMA_GPUDIRECT='peermem'", "modprobe nvidia_peermem", "say dmabuf"});
  set_way("yes");
  try {
    make_communicator(make_local_store(), options_of(0, 1));
    CHECK(!"another value was taken");
  } catch (const UsageError& error) {
    check(error.what(), {"HOLMES_RDMA_GPUDIRECT='yes'", "off, dmabuf or peermem"});
  }
  set_way(nullptr);
}

void check_gpu_direct() {
  check_direct_missing();
  set_way("dmabuf");
  check_direct();
  check_direct_order();
  check_direct_refused();
  check_abort();
  check_loss(2 << 20, 2);
  check_lost_port({20});
  char root[] = "/tmp/holmes-peermem-XXXXXX";
  CHECK(::mkdtemp(root) != nullptr);
  std::filesystem::create_directories(std::string(root) + "/module/nvidia_peermem");
  ::setenv("HOLMES_SYSFS_ROOT", root, 1);
  fake().set("peermem", 1);
  set_way("peermem");
  check_direct();
  set_way(nullptr);
  fake().set("peermem", 0);
  ::unsetenv("HOLMES_SYSFS_ROOT");
  std::filesystem::remove_all(root);
}

}  // namespace

int main() {
  ::setenv("HOLMES_PINNED_RING_BYTES", "524288", 1);
  if (!has_locked_memory()) return std::printf("GPU messages over RDMA: not tried, ulimit -l is below 8 MiB\n"), 0;
  check_no_copies();
  check_registered_once();
  check_sizes();
  check_unexpected();
  check_abort();
  check_loss(6 * slot_bytes, 1);
  check_lost_port({3, 40});
  check_limits();
  check_gpu_direct();
  std::printf("GPU messages over RDMA: ok\n");
  return 0;
}
