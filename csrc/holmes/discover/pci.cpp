#include "holmes/discover/pci.hpp"

#include <algorithm>
#include <ranges>
#include <sstream>

namespace holmes {
namespace {

constexpr const char* nvidia_vendor = "0x10de";
constexpr const char* amd_vendor = "0x1002";

std::vector<std::string> components(const std::string& path) {
  std::vector<std::string> result;
  std::istringstream stream(path);
  for (std::string part; std::getline(stream, part, '/');) result.push_back(part);
  return result;
}

// "0000:16:00.0"; virtual PCI domains (Azure's "0001ab", VMD's "10000") may have more digits.
bool is_pci_address(const std::string& name) {
  const auto colon = name.find(':');
  return colon != std::string::npos && colon >= 4 && name.size() == colon + 8 && name[colon + 3] == ':' &&
         name[colon + 6] == '.';
}

// PCI base classes: 0x0300 VGA, 0x0302 3D controller; AMD Instinct: 0x0380 other display, 0x1200 accelerator.
bool is_gpu(const std::string& vendor, const std::string& pci_class) {
  const auto is = [&](const char* prefix) { return pci_class.starts_with(prefix); };
  if (vendor == nvidia_vendor) return is("0x0300") || is("0x0302");
  return vendor == amd_vendor && (is("0x0300") || is("0x0302") || is("0x0380") || is("0x1200"));
}

}  // namespace

std::optional<PciDevice> find_pci_device(const Sysfs& sysfs, const std::string& device) {
  for (std::string path = device; path.find('/') != std::string::npos; path.resize(path.rfind('/'))) {
    if (!is_pci_address(last_component(path))) continue;
    const auto node = sysfs.read_integer(path + "/numa_node");
    PciDevice found{last_component(path), path, std::nullopt};
    if (node && *node >= 0) found.numa_node = static_cast<int>(*node);  // the kernel says -1 where it does not know
    return found;
  }
  return std::nullopt;
}

std::vector<PciDevice> find_gpus(const Sysfs& sysfs) {
  std::vector<PciDevice> gpus;
  for (const auto& address : sysfs.list("bus/pci/devices")) {
    const std::string folder = "bus/pci/devices/" + address;
    if (!is_gpu(sysfs.read(folder + "/vendor").value_or(""), sysfs.read(folder + "/class").value_or(""))) continue;
    if (const auto path = sysfs.resolve(folder))
      if (auto gpu = find_pci_device(sysfs, *path)) gpus.push_back(std::move(*gpu));
  }
  return gpus;
}

PciDistance pci_distance(const PciDevice& a, const PciDevice& b) {
  const auto path_a = components(a.path), path_b = components(b.path);
  const auto parted = std::ranges::mismatch(path_a, path_b).in1;
  const auto is_host_bridge = [](const std::string& part) { return part.starts_with("pci"); };
  if (std::any_of(path_a.begin(), parted, is_host_bridge)) {
    const auto common = static_cast<std::size_t>(parted - path_a.begin());
    return {PciDistance::Level::same_host_bridge, static_cast<int>(path_a.size() + path_b.size() - 2 * common)};
  }
  if (a.numa_node && a.numa_node == b.numa_node) return {PciDistance::Level::same_numa_node, 0};
  return {PciDistance::Level::other, 0};
}

std::vector<std::string> nearest_gpus(const PciDevice& device, const std::vector<PciDevice>& gpus) {
  std::vector<std::string> nearest;
  if (gpus.empty()) return nearest;
  const auto distance = [&](const PciDevice& gpu) { return pci_distance(device, gpu); };
  const PciDistance smallest = distance(*std::ranges::min_element(gpus, {}, distance));
  for (const auto& gpu : gpus)
    if (distance(gpu) == smallest) nearest.push_back(gpu.address);
  return nearest;
}

}  // namespace holmes
