// PCI: where a device sits, and which GPUs are nearest to it.
#pragma once

#include <compare>
#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/sysfs.hpp"

namespace holmes {

// A PCI function on its path through the machine.
struct PciDevice {
  std::string address;  // "0000:16:00.0"
  std::string path;     // "devices/pci0000:15/0000:15:01.0/0000:16:00.0", relative to the sysfs root
  std::optional<int> numa_node;

  bool operator==(const PciDevice&) const = default;
};

// The PCI function that `device` (a path below the root) is or hangs below, as a virtio NIC does; absent if none.
std::optional<PciDevice> find_pci_device(const Sysfs& sysfs, const std::string& device);

// NVIDIA and AMD GPUs, by address.
std::vector<PciDevice> find_gpus(const Sysfs& sysfs);

// Smaller is nearer. Across host bridges every hop count is the same traffic over the CPU, so only the NUMA node
// counts.
struct PciDistance {
  enum class Level { same_host_bridge, same_numa_node, other } level = Level::other;
  int hops = 0;  // links between the two; 0 beyond the host bridge

  auto operator<=>(const PciDistance&) const = default;
};

PciDistance pci_distance(const PciDevice& a, const PciDevice& b);

// Addresses of the GPUs at the smallest distance from `device`, in order.
std::vector<std::string> nearest_gpus(const PciDevice& device, const std::vector<PciDevice>& gpus);

}  // namespace holmes
