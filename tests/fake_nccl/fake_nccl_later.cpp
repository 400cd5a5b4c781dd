// The functions of the fake NCCL that only later versions have: registered buffers, shrinking.
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "fake_comm.hpp"
#include "fake_cuda.hpp"
#include "reduction.hpp"

using namespace fake_nccl;

extern "C" {

int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes);
int cuMemFree_v2(unsigned long long address);
int ncclGetUniqueId(UniqueId* id);
int ncclSend(const void* data, std::size_t count, int type, int peer, ncclComm* comm, void* stream);
int ncclRecv(void* data, std::size_t count, int type, int peer, ncclComm* comm, void* stream);
int ncclGroupStart();
int ncclGroupEnd();
int ncclCommInitRankConfig(ncclComm** comm, int size, UniqueId id, int rank, const char* config);

#if FAKE_NCCL_VERSION >= 21900
int ncclCommRegister(ncclComm* comm, void* buffer, std::size_t bytes, void** handle) {
  const FakeCall call("ncclCommRegister");
  if (comm == nullptr || buffer == nullptr || bytes == 0) return fail(invalid_argument, "fake: register");
  *handle = buffer;
  comm->registered.insert(buffer);
  return success;
}
int ncclCommDeregister(ncclComm* comm, void* handle) {
  const FakeCall call("ncclCommDeregister");
  return comm->registered.erase(handle) == 1 ? success : fail(invalid_argument, "fake: no such registration");
}
#endif

#if FAKE_NCCL_VERSION >= 22800
int ncclAlltoAll(const void* send, void* recv, std::size_t count, int type, ncclComm* comm, void* stream) {
  const FakeCall call("ncclAlltoAll");
  if (comm == nullptr || element_bytes(type) == 0) return fail(invalid_argument, "fake: all_to_all");
  const std::size_t bytes = count * element_bytes(type);
  ncclGroupStart();
  for (int peer = 0; peer < comm->size; ++peer) {
    const std::size_t skip = static_cast<std::size_t>(peer) * bytes;
    ncclSend(static_cast<const char*>(send) + skip, count, type, peer, comm, stream);
    ncclRecv(static_cast<char*>(recv) + skip, count, type, peer, comm, stream);
  }
  return ncclGroupEnd();
}
#endif

#if FAKE_NCCL_VERSION >= 21900
int ncclMemAlloc(void** memory, std::size_t bytes) {
  const FakeCall call("ncclMemAlloc");
  unsigned long long address = 0;
  if (cuMemAlloc_v2(&address, bytes) != 0) return unhandled_cuda_error;
  *memory = reinterpret_cast<void*>(address);
  return success;
}
int ncclMemFree(void* memory) {
  const FakeCall call("ncclMemFree");
  return cuMemFree_v2(reinterpret_cast<unsigned long long>(memory)) == 0 ? success : invalid_argument;
}
#endif

// Collective over all ranks of `old`, which say what they want over its own sockets: nothing may be running there.
int ncclCommSplit(ncclComm* old, int color, int key, ncclComm** made, const char* config) {
  const FakeCall call("ncclCommSplit");
  struct Wish {
    int color, key;
    UniqueId id;
  };
  *made = nullptr;
  while (old->running > 0) ::usleep(100);
  if (has_fault(*old, "split_fail")) color = -2;
  const auto size = static_cast<std::size_t>(old->size);
  const Wish own{color, key, {}};
  std::vector<Wish> wishes(size, own);
  const auto exchange = [&](const Wish& mine) {
    std::vector<Transfer> sends, recvs;
    for (int peer = 0; peer < old->size; ++peer) {
      if (peer == old->rank) continue;
      sends.push_back({peer, reinterpret_cast<char*>(const_cast<Wish*>(&mine)), sizeof(Wish)});
      recvs.push_back({peer, reinterpret_cast<char*>(&wishes[static_cast<std::size_t>(peer)]), sizeof(Wish)});
    }
    wishes[static_cast<std::size_t>(old->rank)] = mine;
    return transfer(old->sockets, sends, recvs, old->stop);
  };
  if (!exchange(own)) return fail(remote_error, "fake: split: a peer is gone");
  for (const Wish& wish : wishes)
    if (wish.color < -1) return fail(system_error, "fake: splitting fails as asked");
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int rank = 0; rank < old->size; ++rank)
    if (color >= 0 && wishes[static_cast<std::size_t>(rank)].color == color)
      members.emplace_back(wishes[static_cast<std::size_t>(rank)].key, rank);
  std::sort(members.begin(), members.end());
  Wish leader = own;
  if (!members.empty() && members.front().second == old->rank && ncclGetUniqueId(&leader.id) != success)
    return system_error;
  if (!exchange(leader)) return fail(remote_error, "fake: split: a peer is gone");
  if (members.empty()) return success;
  const auto at = std::find(members.begin(), members.end(), std::pair(key, old->rank));
  return ncclCommInitRankConfig(made, static_cast<int>(members.size()),
                                wishes[static_cast<std::size_t>(members.front().second)].id,
                                static_cast<int>(at - members.begin()), config);
}

#if FAKE_NCCL_VERSION >= 22700
// Collective over the communicator where it is symmetric (flags 1).
int ncclCommWindowRegister(ncclComm* comm, void* buffer, std::size_t bytes, void** window, int flags) {
  const FakeCall call("ncclCommWindowRegister");
  if (comm == nullptr || buffer == nullptr || bytes == 0 || flags != 1) return fail(invalid_argument, "fake: window");
  *window = buffer;
  comm->registered.insert(buffer);
  return success;
}
int ncclCommWindowDeregister(ncclComm* comm, void* window) {
  const FakeCall call("ncclCommWindowDeregister");
  return comm->registered.erase(window) == 1 ? success : fail(invalid_argument, "fake: no such window");
}

// The ranks that stay meet at a new root, whose address they leave in a file.
int ncclCommShrink(ncclComm* old, int* excluded, int count, ncclComm** made, const char* config, int flags) {
  const FakeCall call("ncclCommShrink");
  if (old == nullptr || count <= 0) return fail(invalid_argument, "fake: shrink");
  if (flags == 1) old->stop = true;
  if (flags == 0 && old->running > 0) return fail(invalid_usage, "fake: shrink with operations in flight");
  std::sort(excluded, excluded + count);
  int rank = 0;
  for (int r = 0; r < old->rank; ++r) rank += std::binary_search(excluded, excluded + count, r) ? 0 : 1;
  const char* folder = std::getenv("TMPDIR");
  const std::string path = std::string(folder ? folder : "/tmp") + "/fake_nccl_" +
                           std::to_string(ntohs(old->root.sin_port)) + "_" + std::to_string(old->shrinks++);
  UniqueId id{};
  if (has_fault(*old, "shrink_fail")) return fail(system_error, "fake: shrinking fails as asked");
  if (rank == 0) {
    if (ncclGetUniqueId(&id) != success) return system_error;
    std::FILE* file = std::fopen((path + ".new").c_str(), "w");
    if (file == nullptr) return system_error;
    std::fwrite(&id, sizeof(id), 1, file);
    std::fclose(file);
    std::rename((path + ".new").c_str(), path.c_str());
  } else {
    std::FILE* file = nullptr;
    for (int tries = 0; file == nullptr && tries < 5000; ++tries) {
      file = std::fopen(path.c_str(), "r");
      if (file == nullptr) ::usleep(1000);
    }
    if (file == nullptr || std::fread(&id, sizeof(id), 1, file) != 1) return fail(system_error, "fake: no root");
    std::fclose(file);
  }
  const int result = ncclCommInitRankConfig(made, old->size - count, id, rank, config);
  if (rank == 0 && *made != nullptr) (*made)->root_file = path;
  return result;
}
#endif
}
