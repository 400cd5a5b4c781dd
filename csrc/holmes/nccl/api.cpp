#include "holmes/nccl/api.hpp"

#include <dlfcn.h>

#include "holmes/core/error.hpp"

namespace holmes::nccl {
namespace {

template <class Function>
bool resolve(void* handle, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(handle, symbol));
  return function != nullptr;
}

}  // namespace

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

}  // namespace holmes::nccl
