// Profiles: what an image is told, what is refused before NCCL sees it, when the stock library will do.
#include <map>

#include "check.hpp"
#include "holmes/nccl/choose.hpp"

using namespace holmes;
using namespace holmes::nccl;
using test::contains;
using test::message_of;

namespace {

Nic ethernet(const std::string& name, const std::string& address) {
  Nic nic;
  nic.name = nic.netdev = name;
  nic.link_layer = "Ethernet";
  nic.state = "up";
  nic.is_up = nic.is_netdev_up = true;
  if (!address.empty()) nic.addresses = {{address, 24}};
  return nic;
}

Nic rdma(const std::string& name, const std::string& address, const std::string& hca, NicClass nic_class) {
  Nic nic = ethernet(name, address);
  nic.nic_class = nic_class;
  nic.hca = hca;
  nic.port = 1;
  nic.link_layer = nic_class == NicClass::infiniband ? "InfiniBand" : "Ethernet";
  nic.state = "active";
  return nic;
}

std::vector<Nic> machine() {
  Nic down = ethernet("eth9", "10.9.0.1");
  down.is_up = down.is_netdev_up = false;
  down.state = "down";
  Nic dead_port = rdma("ib3", "10.3.0.1", "mlx5_3", NicClass::infiniband);
  dead_port.is_up = false;
  dead_port.state = "down";
  Nic loopback = ethernet("lo", "127.0.0.1");
  loopback.nic_class = NicClass::loopback;
  return {rdma("ib0", "10.1.0.1", "mlx5_0", NicClass::infiniband),
          rdma("rdma1", "10.2.0.1", "mlx5_1", NicClass::roce_v2),
          dead_port,
          ethernet("eth0", "10.0.0.1"),
          ethernet("eth1", ""),
          down,
          ethernet("docker0", "172.17.0.1"),
          loopback};
}

std::string value(const Variables& variables, const std::string& name) {
  const auto found = variables.find(name);
  CHECK(found != variables.end());
  return found == variables.end() ? "?" : found->second.value_or("(hidden)");
}

void test_variables() {
  const Profile socket{.net = Net::socket, .interfaces = {"eth0", "eth1"}};
  const Variables of_socket = image_variables(socket);
  CHECK(value(of_socket, "NCCL_SOCKET_IFNAME") == "=eth0,eth1" && value(of_socket, "NCCL_IB_DISABLE") == "1");
  CHECK(value(of_socket, "NCCL_NET") == "(hidden)" && value(of_socket, "NCCL_IB_HCA") == "(hidden)");
  CHECK(value(of_socket, "NCCL_ENV_PLUGIN") == "none" && !of_socket.contains("NCCL_HOSTID"));
  Profile ib{.net = Net::ib, .hcas = {"mlx5_0:1", "mlx5_2:1"}, .interfaces = {"ib0"}, .gid_index = 3, .host_id = "h"};
  const Variables of_ib = image_variables(ib);
  CHECK(value(of_ib, "NCCL_IB_HCA") == "=mlx5_0:1,mlx5_2:1" && value(of_ib, "NCCL_IB_DISABLE") == "0");
  CHECK(value(of_ib, "NCCL_IB_GID_INDEX") == "3" && value(of_ib, "NCCL_HOSTID") == "h");
  CHECK(ib.key() != socket.key());
  const Profile plugin{.net = Net::plugin, .interfaces = {"eth0", "eth1"}};
  CHECK(value(image_variables(plugin), "NCCL_NET_PLUGIN") == "holmes" && value(of_socket, "NCCL_NET_PLUGIN") == "none");
  CHECK(value(image_variables(plugin), "NCCL_NET") == "(hidden)" && plugin.key() != socket.key());
  CHECK(plugin.text() == "Holmes as NCCL's plugin over eth0, eth1" && net_from_name("holmes") == Net::plugin);
  const std::string before = ib.key();
  ib.variables["NCCL_IB_TC"] = "106";
  CHECK(ib.key() != before && value(image_variables(ib), "NCCL_IB_TC") == "106");
}

void test_refusals() {
  const auto nics = machine();
  const auto refused = [&](const Profile& profile, const std::string& nic) {
    try {
      check_profile(profile, nics);
    } catch (const NicError& error) {
      CHECK(error.context().nic == nic);
      return std::string(error.what());
    }
    std::fprintf(stderr, "not refused: %s\n", profile.text().c_str());
    ++test::failures;
    return std::string();
  };
  CHECK(contains(refused({.interfaces = {"eth7"}}, "eth7"), "no network interface 'eth7'"));
  CHECK(contains(refused({.interfaces = {"eth7"}}, "eth7"), "eth0 (up)"));
  CHECK(contains(refused({.interfaces = {"eth9"}}, "eth9"), "ip link set eth9 up"));
  CHECK(contains(refused({.interfaces = {"eth1"}}, "eth1"), "no address"));
  CHECK(contains(refused({}, ""), "needs a network interface"));
  CHECK(contains(refused({.net = Net::ib, .interfaces = {"eth0"}}, ""), "no HCA port chosen"));
  CHECK(contains(refused({.net = Net::ib, .hcas = {"mlx5_0:2"}, .interfaces = {"eth0"}}, "mlx5_0:2"), "no HCA port"));
  CHECK(contains(refused({.net = Net::ib, .hcas = {"mlx5_3:1"}, .interfaces = {"eth0"}}, "mlx5_3:1"), "not active"));
  CHECK(contains(refused({.net = Net::ib, .hcas = {"mlx5_0:1", "mlx5_1:1"}, .interfaces = {"eth0"}}, "mlx5_1:1"),
                 "two link layers"));
  CHECK(contains(refused({.interfaces = std::vector<std::string>(17, "eth0")}, "eth0"), "more than NCCL can hold"));
  check_profile({.net = Net::ib, .hcas = {"mlx5_0:1"}, .interfaces = {"ib0"}}, nics);
  check_profile({.interfaces = {"lo"}}, nics);
  CHECK(contains(refused({.net = Net::plugin, .interfaces = {"eth7"}}, "eth7"), "no network interface 'eth7'"));
  check_profile({.net = Net::plugin, .interfaces = {"eth0"}}, nics);

  auto shared = nics;
  shared.push_back(ethernet("eth2", "10.0.0.7"));
  const auto warnings = profile_warnings({.interfaces = {"eth0"}}, shared);
  CHECK(warnings.size() == 1 && contains(warnings.front(), "eth0 and eth2 are in one subnet"));
  CHECK(profile_warnings({.interfaces = {"eth0"}}, nics).empty());
  CHECK(profile_warnings({.net = Net::plugin, .interfaces = {"eth0"}}, shared).empty());  // it binds both ends
}

Lookup environment(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

void test_stock() {
  using Names = std::vector<std::string>;
  const auto nics = machine();
  const auto listed = [&](std::map<std::string, std::string> variables) {
    return stock_devices(nics, environment(std::move(variables)));
  };
  // ib* first; one that cannot carry packets is not listed.
  CHECK(listed({}).interfaces == (Names{"ib0", "ib3"}) && listed({}).hcas == (Names{"mlx5_0:1", "mlx5_1:1"}));
  CHECK(listed({{"NCCL_SOCKET_IFNAME", "eth"}}).interfaces == Names{"eth0"});
  CHECK(listed({{"NCCL_SOCKET_IFNAME", "=eth"}}).interfaces.empty());
  CHECK(listed({{"NCCL_SOCKET_IFNAME", "^eth,lo,docker,ib"}}).interfaces == Names{"rdma1"});
  CHECK(listed({{"NCCL_SOCKET_IFNAME", "^=eth0,lo,docker0,ib0,ib3"}}).interfaces == Names{"rdma1"});
  CHECK(listed({{"NCCL_SOCKET_IFNAME", "e"}}).interfaces == (Names{"ib0", "ib3"}));  // too short to count
  CHECK(listed({{"NCCL_SOCKET_IFNAME", "eth"}, {"NCCL_SOCKET_FAMILY", "AF_INET6"}}).interfaces.empty());
  CHECK(listed({{"NCCL_IB_HCA", "=mlx5_1:1"}}).hcas == Names{"mlx5_1:1"});
  CHECK(listed({{"NCCL_IB_HCA", "mlx5_1:2"}}).hcas.empty());
  CHECK(listed({{"NCCL_IB_HCA", "^mlx5_1"}}).hcas == Names{"mlx5_0:1"});
  CHECK(listed({{"NCCL_IB_DISABLE", "1"}}).hcas.empty());

  const auto judge = [&](const Profile& profile, const std::map<std::string, std::string>& variables,
                         bool files = false) {
    return judge_stock(profile, stock_devices(nics, environment(variables)), environment(variables), files);
  };
  const Profile eth0{.interfaces = {"eth0"}};
  CHECK(judge(eth0, {{"NCCL_SOCKET_IFNAME", "eth0"}}).stock_will_do);
  CHECK(!judge(eth0, {{"NCCL_SOCKET_IFNAME", "eth0"}}, true).stock_will_do);
  CHECK(contains(judge(eth0, {}).reason, "ib0, ib3, not eth0"));
  CHECK(contains(judge(eth0, {{"NCCL_SOCKET_IFNAME", "eth0"}, {"NCCL_NET", "IB"}}).reason, "NCCL_NET=IB"));
  // InfiniBand and sockets beside each other in the stock library, told apart by each communicator's transport.
  const Profile ib{.net = Net::ib, .hcas = {"mlx5_0:1"}, .interfaces = {"eth0"}};
  const std::map<std::string, std::string> site = {{"NCCL_SOCKET_IFNAME", "eth0"}, {"NCCL_IB_HCA", "mlx5_0"}};
  CHECK(judge(ib, site).stock_will_do && judge(eth0, site).stock_will_do);
  const Profile roce{.net = Net::ib, .hcas = {"mlx5_1:1"}, .interfaces = {"eth0"}, .gid_index = 3};
  CHECK(contains(judge(roce, site).reason, "mlx5_0:1, not mlx5_1:1"));

  // The plugin is told of its NICs, whatever the stock library lists for itself.
  const Profile plugin{.net = Net::plugin, .interfaces = {"eth0"}};
  const std::map<std::string, std::string> names_it = {{"NCCL_NET_PLUGIN", "holmes"}};
  CHECK(judge(plugin, names_it).stock_will_do && contains(judge(plugin, names_it).reason, "handshakes go over ib0"));
  CHECK(judge(plugin, {{"NCCL_NET", "Holmes"}}).stock_will_do && judge(plugin, {}).stock_will_do);
  CHECK(contains(judge(plugin, {{"NCCL_NET", "Socket"}}).reason, "NCCL_NET=Socket rules"));
  CHECK(contains(judge(plugin, {{"NCCL_NET", "holmes"}, {"NCCL_CONF_FILE", "f"}}).reason, "NCCL_CONF_FILE=f rules"));
  CHECK(contains(judge(plugin, {{"NCCL_COMM_ID", "a:1"}}).reason, "NCCL_COMM_ID=a:1 rules"));
  CHECK(contains(judge(plugin, {{"NCCL_SOCKET_IFNAME", "none"}}).reason, "no interface for its handshakes"));
  CHECK(!judge(plugin, names_it, true).stock_will_do);
  CHECK(!judge({.net = Net::plugin, .interfaces = {"eth0"}, .host_id = "h"}, names_it).stock_will_do);
  CHECK(contains(judge(eth0, {{"NCCL_SOCKET_IFNAME", "eth0"}, {"NCCL_NET_PLUGIN", "holmes"}}).reason,
                 "NCCL_NET_PLUGIN=holmes rules"));

  const auto settings = site_settings(environment({{"NCCL_IB_DISABLE", "1"}, {"HOME", "/home/u"}}),
                                      [](const std::string& path) { return path == "/home/u/.nccl.conf"; });
  CHECK(settings.size() == 2 && contains(settings.front(), "NCCL_IB_DISABLE=1"));
  CHECK(contains(settings.back(), "/home/u/.nccl.conf"));
}

}  // namespace

int main() {
  test_variables();
  test_refusals();
  test_stock();
  return test::result("test_nccl_profile");
}
