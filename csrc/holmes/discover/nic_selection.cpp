#include "holmes/discover/nic_selection.hpp"

#include <arpa/inet.h>
#include <fnmatch.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <map>
#include <ranges>
#include <utility>

#include "holmes/core/env.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

constexpr int max_rails_of_a_pair = 64;  // what a communicator can connect

// What each class of a selection covers.
const std::vector<std::pair<std::string, std::vector<NicClass>>>& classes() {
  // Never destroyed: threads of a process that ends may read it still.
  static const auto& table = *new std::vector<std::pair<std::string, std::vector<NicClass>>>{
      {"infiniband", {NicClass::infiniband}}, {"roce", {NicClass::roce_v2, NicClass::roce_v1}},
      {"roce_v2", {NicClass::roce_v2}},       {"roce_v1", {NicClass::roce_v1}},
      {"ethernet", {NicClass::ethernet}},     {"loopback", {NicClass::loopback}}};
  return table;
}

const std::vector<NicClass>* class_of(const std::string& name) {
  const auto found = std::ranges::find(classes(), name, [](const auto& entry) { return entry.first; });
  return found == classes().end() ? nullptr : &found->second;
}

std::string in_quotes(const std::string& text) { return "'" + text + "'"; }

std::string stripped(const std::string& text) {
  const auto first = text.find_first_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

int number_of(const std::string& key, const std::string& value, const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc{} && end == value.data() + value.size() && number >= 0) return number;
  throw UsageError("NIC selection " + in_quotes(text) + ": " + key + ":" + value + " is no number; write it as '" +
                   key + ":2'");
}

// Whether `subnet` is an address, with or without the length of a prefix, and nothing of it lies behind that.
bool is_network(const std::string& subnet) {
  const auto slash = subnet.find('/');
  const std::string base = subnet.substr(0, slash);
  unsigned char bytes[16];
  const bool is_ipv6 = base.find(':') != std::string::npos;
  if (::inet_pton(is_ipv6 ? AF_INET6 : AF_INET, base.c_str(), bytes) != 1) return false;
  const int longest = is_ipv6 ? 128 : 32;
  int length = longest;
  if (slash != std::string::npos) {
    const std::string digits = subnet.substr(slash + 1);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), length);
    if (error != std::errc{} || end != digits.data() + digits.size() || length < 0 || length > longest) return false;
  }
  IpNetwork as_given = network_of({base, longest});
  as_given.prefix_length = length;
  return network_of({base, length}) == as_given;
}

// A VLAN shares its parent's port: the port's name means the parent.
std::vector<std::string> own_names(const Nic& nic) {
  std::vector<std::string> own{nic.name, nic.netdev};
  if (nic.kind != NicKind::vlan) own.insert(own.end(), {nic.hca, nic.port_name()});
  return own;
}

std::string in_lower_case(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return text;
}

bool is_key(const std::string& word) {
  return word == "class" || word == "subnet" || word == "rails" || word == "streams";
}

// How that is written which `name`, which no NIC has, seems to mean; empty where nothing does.
std::string meant_by(const std::string& name, const std::vector<Nic>& nics) {
  if (name.find(',') != std::string::npos) return "names=(\"eth1\", \"eth2\") are several, as is parse(\"eth1,eth2\")";
  if (name.find_first_of(" ;") != std::string::npos) return "names stand apart, with commas between: 'eth1,eth2'";
  const std::string small = in_lower_case(name);
  if (class_of(small) != nullptr) return "a class is written " + in_quotes("class:" + small);
  if (is_network(name)) return "a subnet is written " + in_quotes("subnet:" + name);
  const auto sign = small.find_first_of(":=");
  if (sign != std::string::npos && is_key(small.substr(0, sign)))
    return "write " + in_quotes(small.substr(0, sign) + ":" + name.substr(sign + 1));
  for (const Nic& nic : nics)
    for (const std::string& own : own_names(nic)) {
      if (in_lower_case(own) == small) return "write " + in_quotes(own);
      if (own.starts_with(name)) return "names are whole here; all that begin with it are " + in_quotes(name + "*");
    }
  return "";
}

std::string summary(const Nic& nic) {
  std::string text = nic.name;
  if (const auto port = nic.port_name(); !port.empty() && port != nic.name) text += " = " + port;
  const bool is_half_up = nic.is_up && !nic.is_netdev_up && !nic.netdev.empty();
  text += " (" + std::string(to_string(nic.nic_class)) + ", " + nic.state;
  if (is_half_up) text += ", " + nic.netdev + " is down";
  if (!nic.addresses.empty())
    text += ", " + nic.addresses.front().address + "/" + std::to_string(nic.addresses.front().prefix_length);
  return text + ")";
}

bool has_name(const Nic& nic, const std::string& pattern) {
  return std::ranges::any_of(own_names(nic), [&](const std::string& name) {
    return !name.empty() && ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
  });
}

std::string why_down(const Nic& nic) {
  if (nic.netdev.empty()) return "has no network interface (load IPoIB or the Ethernet driver)";
  const std::string port = nic.port_name().empty() || nic.is_up
                               ? ""
                               : "port " + nic.port_name() + " is in state " + in_quotes(nic.state) + "; ";
  return "is down (" + port + "check its cable, bring it up with `ip link set " + nic.netdev + " up`)";
}

std::string why_unaddressed(const Nic& nic) {
  return "has no address but link-local ones (give it one with `ip address add ... dev " + nic.netdev + "`)";
}

// "ib0 = mlx5_0:1 (infiniband, active, 10.1.0.1/24); eno1 (ethernet, up)".
std::string in_words(const std::vector<Nic>& nics) { return joined(nics, "; ", summary); }

std::string each(const std::vector<Nic>& nics, std::string (*why)(const Nic&)) {
  const auto text = [&](const Nic& nic) { return "NIC " + nic.name + " " + why(nic); };
  return nics.empty() ? "no NIC is there" : joined(nics, ", ", text);
}

// Where nothing is `left` of what was asked for: says what is wrong with the `rejected` ones, and what there is.
void require(const std::vector<Nic>& left, const NicSelection& selection, const std::vector<Nic>& nics,
             const std::string& problem, const std::vector<Nic>& rejected = {}) {
  if (!left.empty() || !selection.restricts()) return;
  const std::string first = selection.names.empty() ? "" : selection.names.front();
  throw NicError(problem + ". This host has: " + (nics.empty() ? "no NIC at all" : in_words(nics)) +
                     ". Fix: choose an interface that is up and has an address, with NicSelection(...) or HOLMES_NICS "
                     "(`holmes nics` lists them)",
                 {.host = host_name(), .nic = rejected.empty() ? first : rejected.front().name});
}

template <class Wanted>
std::vector<Nic> kept(const std::vector<Nic>& nics, const Wanted& wanted) {
  std::vector<Nic> left;
  std::ranges::copy_if(nics, std::back_inserter(left), wanted);
  return left;
}

std::string called(const NicSelection& selection) {
  return selection.names.empty() ? "" : " called " + joined(selection.names, " or ", in_quotes);
}

// " ('eth': names are whole here; ...)"
std::string meant(const NicSelection& selection, const std::vector<Nic>& nics) {
  for (const std::string& name : selection.names)
    if (const auto words = meant_by(name, nics); !words.empty()) return " (" + in_quotes(name) + ": " + words + ")";
  return "";
}

bool is_rdma(NicClass nic_class) { return nic_class != NicClass::ethernet && nic_class != NicClass::loopback; }

// The NICs with an active RDMA port that it allows, with an address or not.
std::vector<Nic> rdma_ports(const NicSelection& selection, const std::vector<Nic>& nics) {
  try {
    return kept(selection.matching(nics),
                [](const Nic& nic) { return !nic.port_name().empty() && nic.is_up && is_rdma(nic.nic_class); });
  } catch (const NicError&) {
    return {};
  }
}

void append(NicOffer& offer, std::vector<NicCandidate> found, bool is_selected = true) {
  for (NicCandidate& one : found) {
    one.is_selected = is_selected;
    offer.candidates.push_back(std::move(one));
  }
}

}  // namespace

NicSelection NicSelection::parse(const std::string& text) {
  NicSelection selection;
  std::map<std::string, std::string> named;
  std::size_t begin = 0;
  if (text.find(',') != std::string::npos && text.find_first_not_of(", \t") == std::string::npos)
    throw UsageError("NIC selection " + in_quotes(text) +
                     " has no word between its commas; leave it empty for any NIC");
  while (begin <= text.size()) {
    const auto end = std::min(text.find(',', begin), text.size());
    const std::string word = stripped(text.substr(begin, end - begin));
    begin = end + 1;
    selection.fastest |= word == "fastest";
    if (word.empty() || word == "fastest") continue;
    const auto colon = word.find(':');
    const std::string key = word.substr(0, colon);
    if (colon == std::string::npos || !is_key(key)) {
      selection.names.push_back(word);
      continue;
    }
    const std::string value = word.substr(colon + 1);
    if (value.empty() && (key == "class" || key == "subnet"))
      throw UsageError("NIC selection " + in_quotes(text) + " has nothing behind " + in_quotes(key + ":") +
                       "; name one, or leave the word out");
    const auto [at, is_new] = named.emplace(key, value);
    if (!is_new && at->second != value)
      throw UsageError("NIC selection " + in_quotes(text) + " has two of " + in_quotes(key) + ": " +
                       in_quotes(at->second) + " and " + in_quotes(value) + "; keep one");
  }
  selection.nic_class = named["class"];
  selection.subnet = named["subnet"];
  if (named.contains("rails")) selection.max_rails = number_of("rails", named["rails"], text);
  if (named.contains("streams")) selection.streams = number_of("streams", named["streams"], text);
  selection.check();
  return selection;
}

NicSelection NicSelection::from_env() {
  const char* text = std::getenv("HOLMES_NICS");
  return parse(text ? text : "");
}

void NicSelection::check() const {
  if (!nic_class.empty() && class_of(nic_class) == nullptr)
    throw UsageError("NIC class " + in_quotes(nic_class) + " does not exist; use one of " +
                     joined(std::views::keys(classes())));
  const int rails = max_rails.value_or(1);
  if (rails < 1 || rails > max_rails_of_a_pair)
    throw UsageError("max_rails=" + std::to_string(rails) + " is not possible; it must be from 1 to " +
                     std::to_string(max_rails_of_a_pair));
  if (streams < 1 || streams > max_rails_of_a_pair / rails)
    throw UsageError("streams=" + std::to_string(streams) + " is not possible; it must be from 1 to " +
                     std::to_string(max_rails_of_a_pair / rails) + " (rails times streams: at most " +
                     std::to_string(max_rails_of_a_pair) + ")");
  for (const std::string& name : names) {
    if (name.empty()) throw UsageError("names has an empty name; leave it out");
    if (name.starts_with('^'))  // as NCCL_SOCKET_IFNAME and NCCL_IB_HCA have it
      throw UsageError("NIC name " + in_quotes(name) +
                       " is not possible: nothing is excluded here (NCCL's '^'); name the NICs that may be used, or "
                       "choose them by class or subnet: 'class:ethernet', 'subnet:10.1.0.0/16'");
    if (name.starts_with('='))
      throw UsageError("NIC name " + in_quotes(name) + " is not possible: a name is whole without NCCL's '='; write " +
                       in_quotes(name.substr(1)));
  }
  if (!subnet.empty() && !is_network(subnet))
    throw UsageError("subnet " + in_quotes(subnet) + " is no network; write it as '10.1.0.0/16'");
}

std::vector<Nic> NicSelection::matching(const std::vector<Nic>& nics) const {
  auto found = kept(nics, [&](const Nic& nic) { return nic.nic_class != NicClass::loopback || restricts(); });
  if (!names.empty()) {
    found = kept(found, [&](const Nic& nic) {
      return std::ranges::any_of(names, [&](const std::string& name) { return has_name(nic, name); });
    });
    require(found, *this, nics, "no NIC is" + called(*this) + meant(*this, nics));
  }
  if (!nic_class.empty()) {
    found = kept(found, [&](const Nic& nic) { return std::ranges::count(*class_of(nic_class), nic.nic_class) > 0; });
    require(found, *this, nics, "no NIC" + called(*this) + " is of class " + in_quotes(nic_class));
  }
  return found;
}

std::vector<Nic> NicSelection::resolve(const std::vector<Nic>& nics) const {
  const auto found = matching(nics);
  const auto up = kept(found, [](const Nic& nic) { return nic.is_netdev_up; });
  require(up, *this, nics, each(found, why_down), found);
  std::vector<Nic> usable;
  for (const Nic& nic : up)
    if (const auto candidates = socket_candidates(nic, subnet); !candidates.empty())
      usable.push_back(nic.with_address(candidates.front().address.address));
  require(usable, *this, nics,
          subnet.empty() ? each(up, why_unaddressed)
                         : "no NIC" + called(*this) + " that is up has an address in subnet " + subnet,
          up);
  return usable;
}

NicOffer NicSelection::offer(const std::vector<Nic>& nics, Carrier carrier) const {
  NicOffer offer;
  offer.restricts = restricts();
  offer.max_rails = max_rails;
  offer.streams = streams;
  offer.inventory = in_words(nics);
  const auto ports = carrier != Carrier::tcp ? rdma_ports(*this, nics) : std::vector<Nic>{};
  std::vector<Nic> usable;
  try {
    usable = resolve(nics);
  } catch (const NicError&) {
    if (ports.empty() || carrier == Carrier::automatic) throw;
  }
  for (const Nic& nic : usable) append(offer, socket_candidates(nic, subnet));
  for (const Nic& nic : ports) append(offer, rdma_candidates(nic, subnet));
  if (carrier == Carrier::rdma) offer.max_rails = max_rails.value_or(1);
  if (carrier == Carrier::nccl || carrier == Carrier::rdma) {
    offer.wants_rdma = carrier == Carrier::rdma || (!nic_class.empty() && is_rdma(class_of(nic_class)->front()));
    for (const Nic& nic : NicSelection{}.resolve(nics))  // for handshakes
      if (!std::ranges::count(usable, nic.name, &Nic::name)) append(offer, socket_candidates(nic), false);
  }
  const auto loopback = std::ranges::find_if(
      nics, [](const Nic& nic) { return nic.nic_class == NicClass::loopback && !nic.addresses.empty(); });
  if (loopback != nics.end()) offer.loopback = {loopback->name, loopback->addresses.front().address};
  return offer;
}

}  // namespace holmes
