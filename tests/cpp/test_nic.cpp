// Discovery on a tree written file by file as the mlx5 driver shows itself, not by the Python writer of the fixtures.
#include "holmes/discover/nic.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "holmes/core/error.hpp"
#include "holmes/discover/pci.hpp"

namespace fs = std::filesystem;

namespace {

int failures = 0;

void expect(bool good, const char* what, int line) {
  if (good) return;
  ++failures;
  std::printf("FAILED line %d: %s\n", line, what);
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)

class Tree {
public:
  Tree() {
    std::string name = (fs::temp_directory_path() / "holmes-nic-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    root = name;
  }
  ~Tree() { fs::remove_all(root); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  void file(const std::string& path, const std::string& text) const {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text << '\n';
  }
  // `target` is relative to the link, as in sysfs.
  void link(const std::string& path, const std::string& target) const {
    fs::create_directories((root / path).parent_path());
    fs::create_symlink(target, root / path);
  }

  fs::path root;
};

const std::string zero_gid = "0000:0000:0000:0000:0000:0000:0000:0000";

void add_pci(const Tree& tree, const std::string& path, const std::string& vendor, const std::string& pci_class,
             const std::string& numa) {
  tree.file(path + "/vendor", vendor);
  tree.file(path + "/class", pci_class);
  tree.file(path + "/numa_node", numa);
  tree.link("bus/pci/devices/" + path.substr(path.rfind('/') + 1), "../../../" + path);
}

// A dual-port ConnectX-3 (two ports on one function): port 1 InfiniBand with IPoIB, port 2 RoCE with both versions.
void write_dual_port(const Tree& tree) {
  const std::string device = "devices/pci0000:80/0000:80:02.0/0000:82:00.0";
  add_pci(tree, device, "0x15b3", "0x020700", "1");
  for (const auto& [netdev, type, port, speed] :
       {std::tuple("ib0", "32", "0x0", "40000"), {"eth1", "1", "0x1", "10000"}}) {
    const std::string folder = device + "/net/" + netdev;
    tree.file(folder + "/type", type);
    tree.file(folder + "/operstate", "up");
    tree.file(folder + "/flags", "0x1003");
    tree.file(folder + "/mtu", "2044");
    tree.file(folder + "/speed", speed);
    tree.file(folder + "/dev_port", "0");
    tree.file(folder + "/dev_id", port);
    tree.link(folder + "/device", "../../../0000:82:00.0");
    tree.link("class/net/" + std::string(netdev), "../../" + folder);
  }
  tree.file("class/net/bonding_masters", "");
  const std::string hca = device + "/infiniband/mlx4_0";
  tree.file(hca + "/node_type", "1: CA");
  tree.link(hca + "/device", "../../../0000:82:00.0");
  tree.link("class/infiniband/mlx4_0", "../../" + hca);
  tree.file(hca + "/ports/1/state", "4: ACTIVE");
  tree.file(hca + "/ports/1/rate", "56 Gb/sec (4X FDR)");
  tree.file(hca + "/ports/1/link_layer", "InfiniBand");
  tree.file(hca + "/ports/1/gids/0", "fe80:0000:0000:0000:0002:c903:0011:2233");
  tree.file(hca + "/ports/1/gids/1", zero_gid);
  tree.file(hca + "/ports/2/state", "4: ACTIVE");
  tree.file(hca + "/ports/2/rate", "10 Gb/sec (1X QDR)");
  tree.file(hca + "/ports/2/link_layer", "Ethernet");
  // Out of order on purpose: a foreign IPv4 first, its own last, 10 after 9 although "10" sorts first.
  const std::pair<int, const char*> gids[] = {{0, "fe80:0000:0000:0000:0202:c9ff:fe11:2234"},
                                              {1, "fe80:0000:0000:0000:0202:c9ff:fe11:2234"},
                                              {2, "0000:0000:0000:0000:0000:ffff:c0a8:0001"},
                                              {9, "0000:0000:0000:0000:0000:ffff:0a00:0005"},
                                              {10, "0000:0000:0000:0000:0000:ffff:0a00:0005"}};
  for (const auto& [index, gid] : gids) {
    const std::string port = hca + "/ports/2/";
    tree.file(port + "gids/" + std::to_string(index), gid);
    tree.file(port + "gid_attrs/types/" + std::to_string(index), index == 0 || index == 9 ? "IB/RoCE v1" : "RoCE v2");
    tree.file(port + "gid_attrs/ndevs/" + std::to_string(index), "eth1");
  }
  tree.file(hca + "/ports/2/gids/3", zero_gid);
  // An iWARP adapter also says Ethernet, but is no RoCE NIC.
  tree.file("class/infiniband/iw0/node_type", "4: RNIC");
  tree.file("class/infiniband/iw0/ports/1/link_layer", "Ethernet");
}

void test_dual_port() {
  const Tree tree;
  write_dual_port(tree);
  add_pci(tree, "devices/pci0000:80/0000:80:02.0/0000:84:00.0", "0x10de", "0x030200", "1");
  add_pci(tree, "devices/pci0000:80/0000:80:03.0/0000:85:00.0", "0x10de", "0x030200", "1");
  add_pci(tree, "devices/pci0000:80/0000:80:02.0/0000:86:00.0", "0x1a03", "0x030000", "1");  // a console's VGA
  tree.file("addresses", "ib0 10.1.0.5/24\neth1 fe80::1/64\neth1 10.0.0.5/24");
  tree.file("proc/net/route", "Iface\tDestination\tGateway\tFlags\neth1\t00000000\t0100000A\t0003");

  const auto nics = holmes::discover_nics(tree.root);
  EXPECT(nics.size() == 2);
  if (nics.size() != 2) return;
  const auto &ib = nics[0], &roce = nics[1];
  EXPECT(ib.name == "ib0" && ib.nic_class == holmes::NicClass::infiniband && ib.port_name() == "mlx4_0:1");
  EXPECT(ib.speed_gbps == 56 && ib.gid_index == 0 && ib.gids.size() == 1 && ib.gids[0].type == "IB");
  EXPECT(ib.state == "active" && ib.is_up && ib.is_netdev_up && ib.numa_node == 1 && ib.mtu == 2044);
  EXPECT(ib.pci_address == "0000:82:00.0" && ib.nearest_gpus == std::vector<std::string>{"0000:84:00.0"});
  EXPECT(roce.name == "eth1" && roce.nic_class == holmes::NicClass::roce_v2 && roce.port_name() == "mlx4_0:2");
  EXPECT(roce.gid_index == 10 && roce.gids.size() == 5 && roce.speed_gbps == 10 && roce.has_gateway && !ib.has_gateway);
  EXPECT(roce.addresses.size() == 2 && roce.addresses[0] == (holmes::IpAddress{"10.0.0.5", 24}));

  EXPECT(holmes::find_nic("eth1", tree.root)->hca == "mlx4_0");
  EXPECT(holmes::find_nic("mlx4_0:2", tree.root)->name == "eth1");
  EXPECT(holmes::find_nic("mlx4_0", tree.root)->name == "ib0");
  EXPECT(!holmes::find_nic("mlx4_0:3", tree.root));
}

void test_gid_choice() {
  const auto choose = [](std::vector<holmes::Gid> gids) {
    holmes::RdmaPort port;
    port.is_roce = true;
    port.gids = std::move(gids);
    return holmes::choose_gid_index(port, "eth0", {{"10.0.0.5", 24}, {"2001:db8::5", 64}});
  };
  const std::string own4 = "::ffff:10.0.0.5", own6 = "2001:db8::5", other4 = "::ffff:10.0.0.6", local = "fe80::5";
  const std::string v1 = "RoCE v1", v2 = "RoCE v2";
  EXPECT(!choose({}));
  EXPECT(choose({{0, local, v2, "eth0"}, {1, own6, v2, "eth0"}, {2, own4, v2, "eth0"}}) == 2);
  EXPECT(choose({{0, local, v2, "eth0"}, {1, other4, v2, "eth0"}, {2, own6, v2, "eth0"}}) == 2);
  EXPECT(choose({{0, own4, v1, "eth0"}, {1, local, v2, "eth0"}}) == 1);   // version before address
  EXPECT(choose({{0, own4, v2, "eth0.7"}, {1, own4, v1, "eth0"}}) == 1);  // another interface's
  EXPECT(!choose({{0, own4, v2, "eth0.7"}}));
}

void test_pci_distance() {
  using holmes::pci_distance;
  using Level = holmes::PciDistance::Level;
  const holmes::PciDevice nic{"0000:02:00.0", "devices/pci0000:00/0000:00:01.0/0000:02:00.0", 0};
  const holmes::PciDevice beside{"0000:03:00.0", "devices/pci0000:00/0000:00:01.0/0000:03:00.0", 0};
  const holmes::PciDevice same_bridge{"0000:04:00.0", "devices/pci0000:00/0000:00:02.0/0000:04:00.0", 0};
  const holmes::PciDevice same_node{"0000:41:00.0", "devices/pci0000:40/0000:41:00.0", 0};
  const holmes::PciDevice far{"0000:81:00.0", "devices/pci0000:80/0000:81:00.0", 1};
  const holmes::PciDevice unknown{"0000:c1:00.0", "devices/pci0000:c0/0000:c1:00.0", std::nullopt};
  EXPECT(pci_distance(nic, beside) == (holmes::PciDistance{Level::same_host_bridge, 2}));
  EXPECT(pci_distance(nic, beside) < pci_distance(nic, same_bridge));
  EXPECT(pci_distance(nic, same_bridge) < pci_distance(nic, same_node));
  EXPECT(pci_distance(nic, same_node) < pci_distance(nic, far));
  EXPECT(pci_distance(nic, far) == pci_distance(nic, unknown));
}

// The kernel writes operstate a moment after the carrier has come, or gone.
void test_carrier_is_ahead_of_the_state() {
  const auto is_up = [](const char* flags, const char* carrier) {
    const Tree tree;
    const std::string folder = "devices/virtual/net/veth0";
    tree.file(folder + "/type", "1");
    tree.file(folder + "/operstate", "down");
    tree.file(folder + "/flags", flags);
    tree.file(folder + "/carrier", carrier);
    tree.link("class/net/veth0", "../../" + folder);
    tree.file("addresses", "veth0 10.0.0.5/24");
    const auto nic = holmes::find_nic("veth0", tree.root);
    EXPECT(nic.has_value());
    return nic && nic->is_up;
  };
  EXPECT(is_up("0x1003", "1"));
  EXPECT(!is_up("0x1003", "0"));
  EXPECT(!is_up("0x1002", "1"));
}

void test_wrong_roots() {
  for (const char* root : {"/no/such/folder", "/proc/self/status"}) {
    try {
      holmes::discover_nics(root);
      EXPECT(!"discover_nics must throw");
    } catch (const holmes::UsageError& error) {
      EXPECT(std::string(error.what()).find(root) != std::string::npos);
    }
  }
}

void test_running_kernel() {
  const auto loopback = holmes::find_nic("lo", "/sys");
  EXPECT(loopback && loopback->nic_class == holmes::NicClass::loopback && loopback->hca.empty());
}

}  // namespace

int main() {
  test_dual_port();
  test_gid_choice();
  test_pci_distance();
  test_carrier_is_ahead_of_the_state();
  test_wrong_roots();
  test_running_kernel();
  std::printf(failures == 0 ? "test_nic: all good\n" : "test_nic: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
