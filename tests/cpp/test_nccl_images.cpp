// NCCL images with the real library, without a GPU: one process, three interfaces, an environment that stays as it was.
// Needs a libnccl (HOLMES_NCCL_LIBRARY, or the system's), user namespaces and the ip command.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <link.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "check.hpp"
#include "holmes/nccl/choose.hpp"

using namespace holmes;
using namespace holmes::nccl;
using test::contains;
using test::message_of;

#if defined(__SANITIZE_ADDRESS__)
// NCCL's own leaks.
extern "C" const char* __lsan_default_suppressions() { return "leak:libnccl\nleak:/proc/self/fd/\nleak:/memfd:\n"; }
#endif

namespace {

constexpr int skipped_status = 77;  // SKIP_RETURN_CODE in CMakeLists.txt

void run(const std::string& command) {
  if (std::system(command.c_str()) != 0) std::fprintf(stderr, "'%s' failed\n", command.c_str()), ++test::failures;
}

// The whole process environment, in its order.
std::string environment_bytes() {
  std::string bytes;
  for (char** entry = ::environ; *entry != nullptr; ++entry) bytes += std::string(*entry) + '\0';
  return bytes;
}

// The address a unique id carries: where the other ranks would call.
std::string rendezvous_address(const Api& api) {
  UniqueId id{};
  const Result result = api.get_unique_id(&id);
  if (result != success) return api.describe(result);
  sockaddr_in address{};
  std::memcpy(&address, id.internal + 8, sizeof(address));
  char text[INET_ADDRSTRLEN] = "no IPv4 address";
  if (address.sin_family == AF_INET) ::inet_ntop(AF_INET, &address.sin_addr, text, sizeof(text));
  return text;
}

int image_files() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.find("holmes-nccl") != std::string::npos || target.find("(deleted)") != std::string::npos) ++count;
  }
  return count;
}

// What a namespace has is in netlink; this is the rest of what discovery wants.
std::vector<Nic> find_nics(const std::vector<std::string>& interfaces) {
  const auto root = std::filesystem::temp_directory_path() / ("holmes-sysfs-" + std::to_string(::getpid()));
  for (const std::string& name : interfaces) {
    std::filesystem::create_directories(root / "class/net" / name);
    std::ofstream(root / "class/net" / name / "type") << "1\n";
  }
  auto nics = discover_nics(root.string());
  std::filesystem::remove_all(root);
  return nics;
}

// The first segment of the library that has `address`: headers, symbols, code and (but for the image's holes) GPU code.
std::pair<const char*, std::size_t> code_of(const void* address) {
  struct Search {
    const char* wanted;
    std::pair<const char*, std::size_t> found{nullptr, 0};
  } search{static_cast<const char*>(address), {}};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        std::vector<std::pair<const char*, std::size_t>> segments;
        bool has_address = false;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_LOAD) continue;
          const char* begin = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
          has_address |= begin <= search.wanted && search.wanted < begin + header.p_memsz;
          if (!(header.p_flags & PF_W)) segments.emplace_back(begin, header.p_filesz);
        }
        if (has_address && !segments.empty()) search.found = segments.front();
        return has_address ? 1 : 0;
      },
      &search);
  return search.found;
}

// An image has every byte of the original's code, GPU code included, but for its name and the place of its sections.
void check_same_code(const Api& stock, const Api& image) {
  const auto [original, original_bytes] = code_of(reinterpret_cast<const void*>(stock.get_unique_id));
  const auto [copy, copy_bytes] = code_of(reinterpret_cast<const void*>(image.get_unique_id));
  CHECK(original != nullptr && copy != nullptr && original != copy && original_bytes == copy_bytes);
  if (original == nullptr || copy == nullptr || original_bytes != copy_bytes) return;
  std::size_t different = 0;
  constexpr std::size_t page = 4096;
  for (std::size_t at = sizeof(ElfW(Ehdr)); at < original_bytes; at += page) {
    const std::size_t bytes = std::min(page, original_bytes - at);
    if (std::memcmp(original + at, copy + at, bytes) == 0) continue;
    for (std::size_t i = at; i < at + bytes; ++i) different += original[i] != copy[i];
  }
  CHECK(different == 3);
}

void test_in_namespace() {
  std::vector<std::string> interfaces;
  for (const std::string number : {"0", "1", "2"}) {
    run("ip link add nf" + number + " type veth peer name np" + number + " && ip addr add 10.99." + number +
        ".1/24 dev nf" + number + " && ip link set nf" + number + " up && ip link set np" + number + " up");
    interfaces.push_back("nf" + number);
    interfaces.push_back("np" + number);
  }
  const auto nics = find_nics(interfaces);
  const std::string before = environment_bytes();
  const Library& library = stock_library();
  // The worst neighbour: its symbols come before everybody's own.
  CHECK(::dlopen(library.path.c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD) != nullptr);

  // A wrong interface is refused before any NCCL sees it.
  const int files_before = image_files();
  const std::string refusal = message_of<NicError>([&] { choose({.interfaces = {"nf7"}}, nics); });
  CHECK(contains(refusal, "no network interface 'nf7'") && contains(refusal, "nf0 (up)"));
  CHECK(contains(message_of<NicError>([&] { choose({.interfaces = {"np0"}}, nics); }), "no address"));
  CHECK(image_files() == files_before);

  std::vector<const Api*> apis;
  for (const std::string number : {"0", "1", "2"}) {
    const Chosen chosen = choose({.interfaces = {"nf" + number}}, nics);
    CHECK(chosen.image != nullptr && chosen.api->version == library.api.version);
    if (chosen.image == nullptr) return;
    std::printf("%s: %s\n", chosen.image->text().c_str(), chosen.reason.c_str());
    CHECK(rendezvous_address(*chosen.api) == "10.99." + number + ".1");
    CHECK(chosen.image->answered() > 0);
    CHECK(chosen.image == choose({.interfaces = {"nf" + number}}, nics).image);
    apis.push_back(chosen.api);
  }
  check_same_code(library.api, *apis.front());

  // At once, and again: each keeps its own.
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 9; ++i)
    threads.emplace_back(
        [&, i] { CHECK(rendezvous_address(*apis[i % 3]) == "10.99." + std::to_string(i % 3) + ".1"); });
  for (auto& thread : threads) thread.join();

  // Who needs libnccl.so.2 is given the stock library.
  void* by_name = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  CHECK(by_name == library.handle);

  // What NCCL's configuration files say goes into that image's environment only, below its profile.
  const auto file = std::filesystem::temp_directory_path() / ("holmes-nccl-" + std::to_string(::getpid()) + ".conf");
  std::ofstream(file) << "NCCL_SOCKET_IFNAME=nf2\nNCCL_HOLMES_TEST=1\n";
  const Chosen configured = choose({.interfaces = {"nf1"}, .variables = {{"NCCL_CONF_FILE", file.string()}}}, nics);
  CHECK(rendezvous_address(*configured.api) == "10.99.1.1");
  std::filesystem::remove(file);

  CHECK(environment_bytes() == before);
  // The stock library is as it would be without us.
  ::setenv("NCCL_SOCKET_IFNAME", "=nf2", 1);
  CHECK(rendezvous_address(library.api) == "10.99.2.1");
  CHECK(rendezvous_address(*apis.front()) == "10.99.0.1");
  // With that environment a profile of nf2 needs no image.
  const Chosen stock = choose({.interfaces = {"nf2"}}, nics);
  CHECK(std::filesystem::exists("/etc/nccl.conf") || std::getenv("NCCL_NET") != nullptr || stock.image == nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "in_namespace") {
    test_in_namespace();
    return test::result("test_nccl_images in_namespace");
  }
  try {
    stock_library();
  } catch (const UsageError& error) {
    std::printf("skipped, this needs a libnccl: %s\n", error.what());
    return skipped_status;
  }
  if (std::system("unshare -Urn ip link set lo up 2>/dev/null") != 0) {
    std::puts("skipped, this system does not permit user namespaces (or has no ip command)");
    return skipped_status;
  }
  const std::string self = "unshare -Urn " + std::filesystem::read_symlink("/proc/self/exe").string() + " in_namespace";
  // A variable's value of our own tests that the image's answer comes from its profile all the same.
  run("NCCL_COMM_BLOCKING=1 NCCL_NET=IB " + self);
  run("HOLMES_NCCL_IMAGE=copy " + self);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // The loader only complains of a library that it cannot preload.
  if (std::system("LD_PRELOAD=libjemalloc.so.2 true 2>&1 | grep -q preloaded") != 0) {
    run("LD_PRELOAD=libjemalloc.so.2 " + self);
    std::puts("with jemalloc: done");
  } else {
    std::puts("with jemalloc: skipped, there is no libjemalloc.so.2");
  }
#endif
  return test::result("test_nccl_images");
}
