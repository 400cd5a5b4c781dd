#include "holmes/engine/io_thread_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "holmes/core/cpu_list.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/discover/nic.hpp"

namespace holmes {
namespace {

// Those of `cpus` a thread of this process can run on. A thread of its own asks: the caller's affinity stays as it is.
std::vector<int> usable_cpus(const std::vector<int>& cpus) {
  std::vector<int> usable;
  std::thread([&] {
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &wanted);
    if (::pthread_setaffinity_np(::pthread_self(), sizeof wanted, &wanted) != 0) return;
    cpu_set_t given;
    if (::pthread_getaffinity_np(::pthread_self(), sizeof given, &given) != 0) return;
    std::copy_if(cpus.begin(), cpus.end(), std::back_inserter(usable),
                 [&](int cpu) { return CPU_ISSET(static_cast<std::size_t>(cpu), &given); });
  }).join();
  return usable;
}

// The processors next to the NIC. Empty where it belongs to no NUMA node, or this process to another one.
std::vector<int> cpus_near(const std::string& interface) {
  if (interface.empty()) return {};
  const auto nic = find_nic(interface);
  if (!nic || !nic->numa_node) return {};
  const Sysfs sysfs(default_sysfs_root());
  const auto text = sysfs.read("devices/system/node/node" + std::to_string(*nic->numa_node) + "/cpulist");
  const auto cpus = cpu_list_from(text.value_or(""));
  return cpus ? usable_cpus(*cpus) : std::vector<int>{};
}

std::vector<int> chosen_cpus(const Env& env, const std::string& interface) {
  if (env.io_cpus_near_nic) return cpus_near(interface);
  if (env.io_cpus.empty()) return {};
  const std::vector<int> usable = usable_cpus(env.io_cpus);
  if (usable.size() < env.io_cpus.size()) {
    std::vector<int> refused;
    std::ranges::set_difference(env.io_cpus, usable, std::back_inserter(refused));
    throw UsageError(
        "HOLMES_IO_CPUS='" + cpu_list_text(env.io_cpus) + "' is not allowed: this process may not run on " +
        cpu_list_text(refused) +
        "; name processors of this machine that its container may use (nproc, taskset -cp $$) or unset it");
  }
  return usable;
}

struct Pool {
  // Threads on the same processors.
  struct ThreadSet {
    std::vector<IoThread*> threads;
    std::size_t communicators = 0;
  };
  std::uint64_t epoch = fork_epoch();
  std::mutex mutex;
  std::map<std::vector<int>, ThreadSet> thread_sets;
  int threads = 0;
};

// A forked child has none of its parent's threads, and perhaps a locked mutex: it gets a pool of its own. Never
// destroyed: communicators may outlive static destruction.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load();
  if (found && found->epoch == fork_epoch()) return *found;
  Pool* fresh = new Pool();
  if (current.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

}  // namespace

IoThread& io_thread_for(const Env& env, const std::string& interface) {
  const std::vector<int> cpus = chosen_cpus(env, interface);
  Pool& own = pool();
  std::lock_guard lock(own.mutex);
  Pool::ThreadSet& set = own.thread_sets[cpus];
  const std::size_t index = set.communicators % static_cast<std::size_t>(env.io_threads);
  if (index >= set.threads.size()) set.threads.push_back(new IoThread(own.threads++, cpus));
  ++set.communicators;
  return *set.threads[index];
}

}  // namespace holmes
