// Api: the functions of one loaded NCCL, as a table. Library: the stock NCCL of this process, wherever it was found.
#pragma once

#include <dlfcn.h>

#include <string>
#include <vector>

#include "holmes/nccl/abi.hpp"

namespace holmes::nccl {

// Pointers into one loaded library. Those below "later" are null where its version lacks them. A communicator belongs
// to the library that made it: calling another one's functions with it is undefined. Plain data; NCCL's own rules say
// what may be called from several threads.
struct Api {
  int version = 0;  // 21803 is 2.18.3

  Result (*get_version)(int* version) = nullptr;
  Result (*get_unique_id)(UniqueId* id) = nullptr;
  Result (*comm_init_rank_config)(Comm* comm, int size, UniqueId id, int rank, Config* config) = nullptr;
  Result (*comm_finalize)(Comm comm) = nullptr;
  Result (*comm_destroy)(Comm comm) = nullptr;
  Result (*comm_abort)(Comm comm) = nullptr;
  Result (*comm_get_async_error)(Comm comm, Result* error) = nullptr;
  const char* (*get_error_string)(Result result) = nullptr;
  const char* (*get_last_error)(Comm comm) = nullptr;
  Result (*reduction_create_premultiplied_sum)(int* op, void* scalar, int data_type, int residence,
                                               Comm comm) = nullptr;
  Result (*reduction_destroy)(int op, Comm comm) = nullptr;
  Result (*reduce)(const void* send, void* recv, std::size_t count, int data_type, int op, int root, Comm comm,
                   Stream stream) = nullptr;
  Result (*broadcast)(const void* send, void* recv, std::size_t count, int data_type, int root, Comm comm,
                      Stream stream) = nullptr;
  Result (*all_reduce)(const void* send, void* recv, std::size_t count, int data_type, int op, Comm comm,
                       Stream stream) = nullptr;
  Result (*reduce_scatter)(const void* send, void* recv, std::size_t recv_count, int data_type, int op, Comm comm,
                           Stream stream) = nullptr;
  Result (*all_gather)(const void* send, void* recv, std::size_t send_count, int data_type, Comm comm,
                       Stream stream) = nullptr;
  Result (*send)(const void* buffer, std::size_t count, int data_type, int peer, Comm comm, Stream stream) = nullptr;
  Result (*recv)(void* buffer, std::size_t count, int data_type, int peer, Comm comm, Stream stream) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;

  // later
  Result (*all_to_all)(const void* send, void* recv, std::size_t count, int data_type, Comm comm,
                       Stream stream) = nullptr;                                                 // 2.28
  Result (*comm_register)(Comm comm, void* buffer, std::size_t bytes, void** handle) = nullptr;  // 2.19
  Result (*comm_deregister)(Comm comm, void* handle) = nullptr;                                  // 2.19
  // A symmetric window (flags 1) is collective over the communicator.
  Result (*window_register)(Comm comm, void* buffer, std::size_t bytes, void** window, int flags) = nullptr;    // 2.27
  Result (*window_deregister)(Comm comm, void* window) = nullptr;                                               // 2.27
  Result (*memory_allocate)(void** memory, std::size_t bytes) = nullptr;                                        // 2.19
  Result (*memory_free)(void* memory) = nullptr;                                                                // 2.19
  Result (*comm_split)(Comm comm, int color, int key, Comm* made, Config* config) = nullptr;                    // 2.18
  Result (*comm_shrink)(Comm comm, int* excluded, int count, Comm* made, Config* config, int flags) = nullptr;  // 2.27

  // "unhandled system error (2): NET/Socket : ...": what `result` means and the library's last message.
  std::string describe(Result result) const;
};

// The table of the library behind a dlopen handle. Throws UsageError naming `path`, what is missing and the oldest
// version that will do.
Api load_api(void* handle, const std::string& path);

struct Library {
  std::string path;      // of the file, links followed
  std::string found_by;  // "HOLMES_NCCL_LIBRARY", "already loaded", "Python package", "system"
  void* handle = nullptr;
  Api api;
};

// The first of: HOLMES_NCCL_LIBRARY, a libnccl that is already loaded, `package_paths` (the files of Python packages,
// which only Python knows), the system's. Decided at the first call that finds one; later calls return the same.
// Throws UsageError saying where was looked and what to install. Thread-safe.
const Library& stock_library(const std::vector<std::string>& package_paths = {});

// The file of a loaded library, without links; empty where the loader does not tell.
std::string path_of(void* handle);

// Whether the library has it.
template <class Function>
bool resolve(void* handle, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(handle, symbol));
  return function != nullptr;
}

}  // namespace holmes::nccl
