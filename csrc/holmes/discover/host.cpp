#include "holmes/discover/host.hpp"

#include <sys/stat.h>

#include <fstream>

#include "holmes/core/env.hpp"

namespace holmes {

std::string machine_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  struct stat network{};
  // Namespaces belong to threads.
  if (!std::getline(file, boot) || boot.empty() || ::stat("/proc/thread-self/ns/net", &network) != 0) return "";
  return boot + ":" + std::to_string(network.st_dev) + ":" + std::to_string(network.st_ino);
}

std::string host_identity() {
  const std::string machine = machine_identity();
  return machine.empty() ? host_name() : machine;
}

}  // namespace holmes
