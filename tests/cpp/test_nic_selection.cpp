// What HOLMES_NICS says, in C++: the words, what they leave of a host, and what is wrong with them.
// (Python's asks it: tests/unit/test_nics.py has it over recorded machines.)
#include "holmes/discover/nic_selection.hpp"

#include "check.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

Nic nic(const std::string& name, NicClass nic_class, std::vector<IpAddress> addresses, bool is_up = true) {
  Nic made;
  made.name = made.netdev = name;
  made.nic_class = nic_class;
  made.kind = nic_class == NicClass::loopback ? NicKind::loopback : NicKind::physical;
  made.link_layer = nic_class == NicClass::loopback ? "Loopback" : "Ethernet";
  made.state = is_up ? "up" : "down";
  made.is_up = made.is_netdev_up = is_up;
  made.addresses = std::move(addresses);
  return made;
}

std::vector<Nic> host() {
  std::vector<Nic> nics{nic("eth0", NicClass::ethernet, {{"10.0.0.5", 24}}),
                        nic("eth1", NicClass::ethernet, {{"10.1.0.5", 16}, {"fd00::5", 64}}),
                        nic("eth2", NicClass::ethernet, {{"10.2.0.5", 24}}, false),
                        nic("eth3", NicClass::ethernet, {{"fe80::3", 64}}),
                        nic("roce0", NicClass::roce_v2, {{"10.3.0.5", 24}}),
                        nic("lo", NicClass::loopback, {{"127.0.0.1", 8}})};
  nics[4].hca = "mlx5_0";
  nics[4].port = 1;
  return nics;
}

std::string left_by(const std::string& text) {
  const NicOffer offer = NicSelection::parse(text).offer(host(), Carrier::tcp);
  std::string words;
  for (const NicCandidate& one : offer.candidates)
    words += (words.empty() ? "" : " ") + one.nic + "=" + one.address.address;
  return words;
}

void test_what_is_left() {
  const std::string all = "eth0=10.0.0.5 eth1=10.1.0.5 eth1=fd00::5 roce0=10.3.0.5";
  CHECK(left_by("") == all && left_by(" fastest , ") == all);
  CHECK(left_by("class:ethernet,rails:2") == "eth0=10.0.0.5 eth1=10.1.0.5 eth1=fd00::5");
  CHECK(left_by("class:roce") == "roce0=10.3.0.5" && left_by("mlx5_0:1") == "roce0=10.3.0.5");
  CHECK(left_by("mlx5_*, eth0") == "eth0=10.0.0.5 roce0=10.3.0.5" && left_by("lo") == "lo=127.0.0.1");
  CHECK(left_by("subnet:10.1.0.0/16") == "eth1=10.1.0.5" && left_by("subnet:fe80::/64") == "eth3=fe80::3");
  const NicOffer offer = NicSelection::parse("rails:2,streams:4").offer(host(), Carrier::tcp);
  CHECK(offer.max_rails == 2 && offer.streams == 4 && !offer.restricts && offer.loopback->nic == "lo");
  CHECK(NicSelection::parse("eth1").offer(host(), Carrier::tcp).restricts && !NicSelection::parse("").max_rails);
  CHECK(NicSelection::parse("").offer({}, Carrier::tcp).candidates.empty());
}

void test_what_is_not_there() {
  const auto complaint = [](const std::string& text, std::vector<Nic> nics = host()) {
    return message_of<NicError>([&] { NicSelection::parse(text).offer(nics, Carrier::tcp); });
  };
  const std::string fix =
      "Fix: choose an interface that is up and has an address, with NicSelection(...) or HOLMES_NICS (`holmes nics` "
      "lists them)";
  const auto absent = complaint("ib0,ib1");
  CHECK(contains(absent, "no NIC is called 'ib0' or 'ib1'. This host has: eth0 (ethernet, up, 10.0.0.5/24); eth1 (") &&
        contains(absent, "; roce0 = mlx5_0:1 (roce_v2, up, 10.3.0.5/24); ") && contains(absent, fix));
  CHECK(contains(complaint("eth0,class:roce"), "no NIC called 'eth0' is of class 'roce'"));
  CHECK(contains(complaint("eth2"), "NIC eth2 is down (check its cable, bring it up with `ip link set eth2 up`)"));
  CHECK(contains(complaint("eth3"), "NIC eth3 has no address but link-local ones (give it one with `ip address add"));
  CHECK(contains(complaint("subnet:10.9.0.0/16"), "no NIC that is up has an address in subnet 10.9.0.0/16"));
  // What NCCL's and other ways of writing it seem to mean.
  const auto hint = [&](const std::string& text, const std::string& words) {
    return contains(complaint(text),
                    "no NIC is called '" + text + "' ('" + text + "': " + words + "). This host has: ");
  };
  CHECK(hint("eth", "names are whole here; all that begin with it are 'eth*'"));
  CHECK(hint("mlx5_", "names are whole here; all that begin with it are 'mlx5_*'") && hint("ETH0", "write 'eth0'"));
  CHECK(hint("RoCE", "a class is written 'class:roce'") && hint("class=roce", "write 'class:roce'"));
  CHECK(hint("10.1.0.0/16", "a subnet is written 'subnet:10.1.0.0/16'") &&
        hint("Subnet:fd00::/64", "write 'subnet:fd00::/64'"));
  NicSelection one_name;
  one_name.names = {"eth0,eth1"};
  CHECK(contains(message_of<NicError>([&] { one_name.resolve(host()); }),
                 "('eth0,eth1': names=(\"eth1\", \"eth2\") are several, as is parse(\"eth1,eth2\"))"));
  CHECK(hint("ib0 ib1", "names stand apart, with commas between: 'eth1,eth2'"));
  CHECK(contains(complaint("eth0", {}), "no NIC is called 'eth0'. This host has: no NIC at all. "));
}

void test_wrong_words() {
  const auto complaint = [](const std::string& text) {
    return message_of<UsageError>([&] { NicSelection::parse(text); });
  };
  CHECK(
      contains(complaint("class:myrinet"), "NIC class 'myrinet' does not exist; use one of infiniband, roce, roce_v2"));
  CHECK(contains(complaint("rails:two"), "rails:two is no number; write it as 'rails:2'"));
  CHECK(contains(complaint("class:"), "has nothing behind 'class:'") &&
        contains(complaint("eth0,subnet:"), "'subnet:'"));
  CHECK(contains(complaint(" , "), "has no word between its commas") && NicSelection::parse("eth0,").names.size() == 1);
  CHECK(contains(complaint("streams:"), "streams: is no number") && contains(complaint("rails:-1"), "is no number"));
  CHECK(contains(complaint("rails:0"), "max_rails=0 is not possible; it must be from 1 to 64"));
  CHECK(contains(complaint("rails:8,streams:9"), "streams=9 is not possible; it must be from 1 to 8"));
  CHECK(contains(complaint("class:roce,class:ethernet"), "has two of 'class': 'roce' and 'ethernet'; keep one"));
  CHECK(
      contains(complaint("^docker0,lo"), "NIC name '^docker0' is not possible: nothing is excluded here (NCCL's '^')"));
  CHECK(contains(complaint("=mlx5_0:1"),
                 "'=mlx5_0:1' is not possible: a name is whole without NCCL's '='; write 'mlx5_0:1'"));
  for (const char* subnet : {"10.1.0.0/33", "10.1.0.1/16", "10.1", "10.1.0.0/", "10.1.0.0/x", "fd00::/129", "nonsense"})
    CHECK(contains(complaint(std::string("subnet:") + subnet), "is no network; write it as '10.1.0.0/16'"));
}

}  // namespace

int main() {
  test_what_is_left();
  test_what_is_not_there();
  test_wrong_words();
  return result("test_nic_selection");
}
