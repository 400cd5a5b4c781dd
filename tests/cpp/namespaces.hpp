// Emulated hosts for C++ tests: network namespaces, made without root by a program that runs itself again in a user
// namespace.
#pragma once

#include <fcntl.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "check.hpp"

namespace holmes::test {

inline void run(const std::string& command) {
  if (std::system(command.c_str()) != 0) std::fprintf(stderr, "'%s' failed\n", command.c_str()), ++failures;
}

// A network namespace of its own, as a descriptor; the calling process must be root in its user namespace.
inline int make_namespace() {
  int fd = -1;
  std::thread([&fd] {
    CHECK(::unshare(CLONE_NEWNET) == 0);
    fd = ::open("/proc/thread-self/ns/net", O_RDONLY);  // inherited by the commands that run() starts
    run("ip link set lo up");
  }).join();
  return fd;
}

// Runs this program again with one argument, as root in a user namespace, where the system permits that.
inline void run_in_user_namespace(const std::string& argument) {
  if (std::system("unshare -Urn ip link set lo up 2>/dev/null") != 0) {
    std::puts("namespaces: skipped, this system does not permit user namespaces (or has no ip command)");
    return;
  }
  run("unshare -Urn " + std::filesystem::read_symlink("/proc/self/exe").string() + " " + argument);
}

}  // namespace holmes::test
