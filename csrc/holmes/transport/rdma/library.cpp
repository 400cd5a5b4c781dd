#include "holmes/transport/rdma/library.hpp"

#include <dlfcn.h>
#include <sys/resource.h>

#include <mutex>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"

namespace holmes::verbs {
namespace {

Library load(const std::string& path) {
  const std::string fix =
      "; install libibverbs and the provider of your HCA (Debian: ibverbs-providers, RHEL: libibverbs), name the "
      "library with HOLMES_VERBS_LIBRARY, or use transport tcp";
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    throw NicError("RDMA is asked for, but " + path + " cannot be loaded: " + (why ? why : "no reason given") + fix);
  }
  Library loaded;
  loaded.path = path;
  const auto find = [&](const char* symbol, auto*& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, symbol));
    if (function == nullptr) throw NicError("RDMA is asked for, but " + path + " has no function " + symbol + fix);
  };
  find("ibv_get_device_list", loaded.get_devices);
  find("ibv_free_device_list", loaded.free_devices);
  find("ibv_get_device_name", loaded.device_name);
  find("ibv_open_device", loaded.open);
  find("ibv_close_device", loaded.close);
  find("ibv_query_port", loaded.query_port);
  find("ibv_query_gid", loaded.query_gid);
  find("ibv_query_pkey", loaded.query_pkey);
  find("ibv_alloc_pd", loaded.allocate_domain);
  find("ibv_dealloc_pd", loaded.free_domain);
  find("ibv_reg_mr", loaded.register_memory);
  find("ibv_dereg_mr", loaded.deregister_memory);
  find("ibv_create_comp_channel", loaded.make_channel);
  find("ibv_destroy_comp_channel", loaded.destroy_channel);
  find("ibv_create_cq", loaded.make_queue);
  find("ibv_destroy_cq", loaded.destroy_queue);
  find("ibv_get_cq_event", loaded.get_event);
  find("ibv_ack_cq_events", loaded.acknowledge_events);
  find("ibv_get_async_event", loaded.get_async_event);
  find("ibv_ack_async_event", loaded.acknowledge_async_event);
  find("ibv_create_qp", loaded.make_pair);
  find("ibv_modify_qp", loaded.modify_pair);
  find("ibv_destroy_qp", loaded.destroy_pair);
  find("ibv_wc_status_str", loaded.status_text);
  loaded.register_dmabuf = reinterpret_cast<decltype(loaded.register_dmabuf)>(::dlsym(handle, "ibv_reg_dmabuf_mr"));
  loaded.fork_state = reinterpret_cast<int (*)()>(::dlsym(handle, "ibv_is_fork_initialized"));
  return loaded;
}

}  // namespace

const Library& library() {
  static std::mutex mutex;
  static const Library* found = nullptr;
  std::lock_guard lock(mutex);
  if (found == nullptr) found = new Library(load(Env::read().verbs_library.value_or("libibverbs.so.1")));
  return *found;
}

std::optional<std::size_t> lockable_bytes() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return static_cast<std::size_t>(limit.rlim_cur);
}

}  // namespace holmes::verbs
