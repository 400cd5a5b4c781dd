#include "holmes/nccl/api.hpp"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <mutex>
#include <optional>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"

namespace holmes::nccl {

std::string path_of(void* handle) {
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return "";
  std::error_code error;
  const auto path = std::filesystem::canonical(map->l_name, error);
  return error ? map->l_name : path.string();
}

std::string Api::describe(Result result) const {
  std::string text = std::string(get_error_string(result)) + " (NCCL result " + std::to_string(result) + ")";
  // Per library, not per communicator; still the best hint there is.
  const char* last = get_last_error(nullptr);
  if (last != nullptr && *last != '\0') text += ": " + std::string(last);
  return text;
}

Api load_api(void* handle, const std::string& path) {
  Api api;
  const std::string fix = "; use NCCL " + version_text(oldest_version) + " or later (HOLMES_NCCL_LIBRARY names one)";
  const auto require = [&](const char* symbol, auto*& function) {
    if (!resolve(handle, symbol, function)) throw UsageError(path + " has no function " + symbol + fix);
  };
  require("ncclGetVersion", api.get_version);
  if (api.get_version(&api.version) != success || api.version < oldest_version)
    throw UsageError(path + " is NCCL " + version_text(api.version) + fix);
  require("ncclGetUniqueId", api.get_unique_id);
  require("ncclCommInitRankConfig", api.comm_init_rank_config);
  require("ncclCommFinalize", api.comm_finalize);
  require("ncclCommDestroy", api.comm_destroy);
  require("ncclCommAbort", api.comm_abort);
  require("ncclCommGetAsyncError", api.comm_get_async_error);
  require("ncclGetErrorString", api.get_error_string);
  require("ncclGetLastError", api.get_last_error);
  require("ncclRedOpCreatePreMulSum", api.reduction_create_premultiplied_sum);
  require("ncclRedOpDestroy", api.reduction_destroy);
  require("ncclReduce", api.reduce);
  require("ncclBroadcast", api.broadcast);
  require("ncclAllReduce", api.all_reduce);
  require("ncclReduceScatter", api.reduce_scatter);
  require("ncclAllGather", api.all_gather);
  require("ncclSend", api.send);
  require("ncclRecv", api.recv);
  require("ncclGroupStart", api.group_start);
  require("ncclGroupEnd", api.group_end);
  resolve(handle, "ncclAlltoAll", api.all_to_all);
  resolve(handle, "ncclCommRegister", api.comm_register);
  resolve(handle, "ncclCommDeregister", api.comm_deregister);
  resolve(handle, "ncclCommWindowRegister", api.window_register);
  resolve(handle, "ncclCommWindowDeregister", api.window_deregister);
  resolve(handle, "ncclMemAlloc", api.memory_allocate);
  resolve(handle, "ncclMemFree", api.memory_free);
  resolve(handle, "ncclCommSplit", api.comm_split);
  resolve(handle, "ncclCommShrink", api.comm_shrink);
  return api;
}

namespace {

// Paths of loaded libraries that are called libnccl.so or libnccl.so.<number>. An image of ours has another name.
std::vector<std::string> loaded_paths() {
  std::vector<std::string> paths;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* found) {
        const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const std::string file = path.substr(path.rfind('/') + 1);
        if (file == "libnccl.so" || file.starts_with("libnccl.so."))
          static_cast<std::vector<std::string>*>(found)->push_back(path);
        return 0;
      },
      &paths);
  return paths;
}

// Absent where the file cannot be loaded; `tried` then says why.
std::optional<Library> open(const std::string& path, const std::string& found_by, std::string& tried) {
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    tried += "\n  " + found_by + ": " + ::dlerror();
    return std::nullopt;
  }
  Library library{path_of(handle), found_by, handle, {}};
  library.api = load_api(handle, library.path);
  return library;
}

Library find(const std::vector<std::string>& package_paths) {
  std::string tried;
  if (const auto setting = Env::read().nccl_library) {
    if (auto library = open(*setting, "HOLMES_NCCL_LIBRARY", tried)) return *library;
    throw UsageError("HOLMES_NCCL_LIBRARY='" + *setting + "' cannot be loaded:" + tried +
                     "\nName a libnccl.so.2, or unset it");
  }
  for (const std::string& path : loaded_paths())
    if (auto library = open(path, "already loaded", tried)) return *library;
  for (const std::string& path : package_paths)
    if (auto library = open(path, "Python package", tried)) return *library;
  if (auto library = open("libnccl.so.2", "system", tried)) return *library;
  throw UsageError("no NCCL library found; looked for:" + tried +
                   "\nInstall one (pip install nvidia-nccl-cu12, or -cu13 for CUDA 13), or name its file with "
                   "HOLMES_NCCL_LIBRARY");
}

}  // namespace

const Library& stock_library(const std::vector<std::string>& package_paths) {
  static std::mutex mutex;
  static const Library* found = nullptr;
  std::lock_guard lock(mutex);
  if (found == nullptr) {
    found = new Library(find(package_paths));
    log(LogLevel::info, std::nullopt,
        "NCCL " + version_text(found->api.version) + " from " + found->path + " (" + found->found_by + ")");
  }
  return *found;
}

}  // namespace holmes::nccl
