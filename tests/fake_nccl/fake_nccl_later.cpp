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

#if FAKE_NCCL_VERSION >= 22700
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
