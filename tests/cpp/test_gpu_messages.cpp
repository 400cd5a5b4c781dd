// Messages of a GPU's memory on the fake CUDA driver (HOLMES_CUDA_LIBRARY): for the sanitizers above all, which see the
// driver's threads, the engine's and the callers' at once. What users see: tests/test_gpu_p2p.py.
#include <cstring>

#include "holmes/cuda/device.hpp"
#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

// `count` bytes on a fake GPU: host memory, freed with the last reference.
Buffer device_memory(int device, std::size_t count, int value) {
  const cuda::Driver& cuda = cuda::driver();
  const cuda::CurrentDevice current(cuda::Device::get(device));
  cuda::Address address = 0;
  CHECK(cuda.memory_allocate(&address, std::max<std::size_t>(count, 1)) == cuda::success);
  auto* memory = reinterpret_cast<void*>(address);
  std::memset(memory, value, count);
  Buffer buffer{memory, count, DType::uint8, std::shared_ptr<void>(memory, [](void* used) {
                  cuda::driver().memory_free(reinterpret_cast<cuda::Address>(used));
                })};
  buffer.device = device;
  return buffer;
}

int value_of(int rank, std::uint32_t tag) { return 1 + rank * 100 + static_cast<int>(tag); }

void check_both_ways(Communicator& comm) {
  constexpr std::size_t ring_bytes = 4 * 1024 * 1024;
  const std::vector<std::size_t> sizes{0, 1, 100, 512 * 1024, ring_bytes + 77, 3 * ring_bytes};
  const int peer = 1 - comm.rank();
  std::vector<WorkPtr> works;
  std::vector<Buffer> received;
  std::uint32_t tag = 0;
  for (const std::size_t size : sizes) {
    works.push_back(comm.send(device_memory(comm.rank(), size, value_of(comm.rank(), tag)), peer, tag,
                              {.timeout = {}, .async = true}));
    received.push_back(device_memory(comm.rank(), size, 0));
    works.push_back(comm.recv(received.back(), peer, tag, {.timeout = {}, .async = true}));
    ++tag;
  }
  for (const WorkPtr& work : works) work->wait();
  tag = 0;
  for (const Buffer& buffer : received) {
    for (std::size_t i = 0; i < buffer.count; ++i) CHECK(static_cast<int>(buffer.begin()[i]) == value_of(peer, tag));
    ++tag;
  }
}

// The communicator ends while copies run; its buffers are let go at once.
void check_end_under_way(Communicator& comm) {
  const int peer = 1 - comm.rank();
  const std::size_t size = 8 * 1024 * 1024;
  std::vector<WorkPtr> works;
  for (std::uint32_t tag = 0; tag < 3; ++tag) {
    works.push_back(comm.send(device_memory(comm.rank(), size, 1), peer, tag, {.timeout = {}, .async = true}));
    works.push_back(comm.recv(device_memory(comm.rank(), size, 0), peer, tag, {.timeout = {}, .async = true}));
  }
  const auto may_be_aborted = [](const auto& wait) {
    try {
      wait();
    } catch (const AbortedError& error) {
      CHECK(std::string(error.what()).find("enough") != std::string::npos);
    }
  };
  may_be_aborted([&] { comm.barrier(); });  // all is under way on both
  if (comm.rank() == 0) comm.abort("enough");
  for (const WorkPtr& work : works) may_be_aborted([&] { work->wait(); });
}

}  // namespace

int main() {
  run_communicators(2, Transport::tcp, check_both_ways);
  run_communicators(2, Transport::tcp, check_both_ways, 2);
  run_communicators(2, Transport::shm, check_both_ways);
  run_communicators(2, Transport::tcp, check_end_under_way);
}
