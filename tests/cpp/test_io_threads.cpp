// Which I/O thread a communicator gets, and on which processors it runs, on a recorded machine with a NUMA node.
#include "holmes/engine/io_thread.hpp"

#include <sched.h>

#include <filesystem>
#include <fstream>

#include "check.hpp"
#include "holmes/core/cpu_list.hpp"
#include "holmes/discover/sysfs.hpp"

using namespace holmes;
using namespace holmes::test;
namespace fs = std::filesystem;

namespace {

std::vector<int> allowed_cpus(int thread = 0) {
  cpu_set_t given;
  CHECK(::sched_getaffinity(thread, sizeof given, &given) == 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &given)) cpus.push_back(cpu);
  return cpus;
}

// Of the thread with this name, of which there must be one.
std::vector<int> cpus_of(const std::string& thread_name) {
  std::vector<std::vector<int>> found;
  for (const auto& task : fs::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == thread_name) found.push_back(allowed_cpus(std::stoi(task.path().filename())));
  }
  CHECK(found.size() == 1);
  return found.empty() ? std::vector<int>{} : found.front();
}

void test_cpu_lists() {
  CHECK(cpu_list_from("2,4-7,5") == (std::vector<int>{2, 4, 5, 6, 7}));
  CHECK(cpu_list_text({2, 4, 5, 6, 7, 9}) == "2,4-7,9");
  for (const char* bad : {"", ",", "1,", ",1", "3-1", "-1", "1-", "a", "1 2", "0-99999", "1--2"})
    CHECK(!cpu_list_from(bad));
}

void test_turns() {
  Env env;
  IoThread* const first = &io_thread_for(env, "");
  CHECK(&io_thread_for(env, "lo") == first);
  env.io_threads = 2;
  IoThread* const even = &io_thread_for(env, "");  // the third communicator
  IoThread* const odd = &io_thread_for(env, "");
  CHECK(even == first && odd != first);
  CHECK(&io_thread_for(env, "") == even && &io_thread_for(env, "") == odd);
  CHECK(cpus_of("holmes-io-0") == allowed_cpus() && cpus_of("holmes-io-1") == allowed_cpus());
}

void test_named_processors() {
  const auto before = allowed_cpus();
  Env env;
  env.io_cpus = {before.back()};
  io_thread_for(env, "");
  CHECK(cpus_of("holmes-io-2") == env.io_cpus);
  env.io_cpus.push_back(CPU_SETSIZE - 1);  // no machine of ours has so many
  const auto text = message_of<UsageError>([&] { io_thread_for(env, ""); });
  CHECK(contains(text, "HOLMES_IO_CPUS='" + cpu_list_text(env.io_cpus)) && contains(text, "may not run on 1023"));
  CHECK(allowed_cpus() == before);
}

// eth0 on node 0, which has the last of our processors, eth1 on a node that we may not use, eth2 on none.
void test_processors_near_the_nic() {
  std::string name = (fs::temp_directory_path() / "holmes-io-XXXXXX").string();
  CHECK(::mkdtemp(name.data()) != nullptr);
  const fs::path root = name;
  const int cpu = allowed_cpus().back();
  const auto file = [&](const std::string& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text << '\n';
  };
  for (int i = 0; i < 3; ++i) {
    const std::string device = "devices/pci0000:00/0000:00:0" + std::to_string(i) + ".0";
    const std::string nic = "eth" + std::to_string(i);
    file(device + "/numa_node", std::to_string(i == 2 ? -1 : i));
    file(device + "/net/" + nic + "/type", "1");
    file(device + "/net/" + nic + "/operstate", "up");
    fs::create_symlink("../../../" + last_component(device), root / device / "net" / nic / "device");
    fs::create_directories(root / "class/net");
    fs::create_symlink("../../" + device + "/net/" + nic, root / "class/net" / nic);
  }
  file("devices/system/node/node0/cpulist", std::to_string(cpu));
  file("devices/system/node/node1/cpulist", "1000-1023");
  ::setenv("HOLMES_SYSFS_ROOT", root.c_str(), 1);
  Env env;
  env.io_cpus_near_nic = true;
  IoThread* const anywhere = &io_thread_for({}, "");
  // The same processors as above, named: the same thread.
  Env named;
  named.io_cpus = {cpu};
  CHECK(&io_thread_for(env, "eth0") == &io_thread_for(named, ""));
  for (const char* nic : {"eth1", "eth2", "eth9", ""}) CHECK(&io_thread_for(env, nic) == anywhere);
  ::unsetenv("HOLMES_SYSFS_ROOT");
  fs::remove_all(root);
}

}  // namespace

int main() {
  test_cpu_lists();
  test_turns();
  test_named_processors();
  test_processors_near_the_nic();
  return result("test_io_threads");
}
