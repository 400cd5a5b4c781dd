#include "holmes/discover/nic_choice.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "holmes/core/text.hpp"
#include "holmes/discover/preference.hpp"

namespace holmes {
namespace {

using Offers = std::vector<NicOffer>;
using Ranked = std::vector<const NicCandidate*>;

constexpr int gid_prefix_length = 64;

bool is_plain(NicKind kind) {
  return kind == NicKind::physical || kind == NicKind::virtual_function || kind == NicKind::bond ||
         kind == NicKind::loopback;
}

bool is_roce(NicClass nic_class) { return nic_class == NicClass::roce_v2 || nic_class == NicClass::roce_v1; }

std::string class_text(NicClass nic_class) { return is_roce(nic_class) ? "roce" : to_string(nic_class); }

// A network in which every rank has a NIC, or one of its rails where the ranks have several NICs in it.
struct Lane {
  IpNetwork network;
  NicClass nic_class;  // the least of all members'
  bool is_rdma;
  double speed_gbps;  // of the slowest rank
  Ranked candidates;  // by rank

  std::string text() const { return class_text(nic_class) + " " + network.text(); }
};

bool in_subnet(const IpAddress& address, const std::string& subnet) {
  if (subnet.empty()) return !is_link_local(address.address);
  const auto slash = subnet.find('/');
  const std::string base = subnet.substr(0, slash);
  const int longest = base.find(':') == std::string::npos ? 32 : 128;
  const int length = slash == std::string::npos ? longest : std::stoi(subnet.substr(slash + 1));
  return network_of({address.address, length}) == network_of({base, length});
}

NicCandidate candidate(const Nic& nic, IpAddress address) {
  return {.nic = nic.name,
          .nic_class = nic.nic_class,
          .kind = nic.kind,
          .link_layer = nic.link_layer,
          .wire = nic.parent.empty() ? nic.name : nic.parent,
          .speed_gbps = nic.speed_gbps.value_or(0),
          .address = std::move(address),
          .has_gateway = nic.has_gateway};
}

void check_offers(const Offers& offers) {
  std::vector<int> failed;
  for (std::size_t rank = 0; rank < offers.size(); ++rank)
    if (offers[rank].failure) failed.push_back(static_cast<int>(rank));
  if (!failed.empty()) {
    const int rank = failed.front();
    const NicOffer& first = offers[static_cast<std::size_t>(rank)];
    failed.erase(failed.begin());
    ErrorContext context = first.failure_context;
    context.peer = rank;
    context.host = first.host;
    throw_error(*first.failure,
                "rank " + std::to_string(rank) + " on host " + first.host + ": " + first.failure_text +
                    (failed.empty() ? "" : " (" + ranks_text(failed) + " failed too)"),
                context);
  }
  const auto names_one = [](const NicOffer& offer) { return !offer.cluster.empty(); };
  const auto bare = std::ranges::find_if_not(offers, names_one);
  const auto named = std::ranges::find_if(offers, names_one);
  if (bare == offers.end() || named == offers.end()) return;
  const auto rank = static_cast<int>(bare - offers.begin());
  throw NicError("rank " + std::to_string(rank) + " on host " + bare->host + " names no cluster, but rank " +
                     std::to_string(named - offers.begin()) + " names '" + named->cluster +
                     "'; give every rank one (cluster= or HOLMES_CLUSTER), or none",
                 {.peer = rank, .host = bare->host});
}

// The same address on two machines: not one network but two with equal numbers, as Docker's bridges are.
bool has_clash(const std::vector<Ranked>& members, const Offers& offers) {
  std::map<std::string, std::string> owner;
  for (std::size_t rank = 0; rank < members.size(); ++rank)
    for (const NicCandidate* one : members[rank])
      if (!one->is_gid && owner.emplace(one->address.address, offers[rank].place).first->second != offers[rank].place)
        return true;
  return false;
}

// Whether a GID prefix says nothing: the one that every fabric has until somebody sets another, on ranks that are known
// to be in several fabrics, by their ports' IP networks or the clusters they name.
bool is_ambiguous(const IpNetwork& network, NicClass nic_class, const Offers& offers) {
  if (network != network_of({"fe80::", gid_prefix_length})) return false;
  if (!std::ranges::all_of(offers, [&](const NicOffer& one) { return one.cluster == offers.front().cluster; }))
    return true;
  std::optional<std::set<IpNetwork>> common;
  for (const NicOffer& offer : offers) {
    std::set<IpNetwork> own;
    for (const NicCandidate& one : offer.candidates)
      if (one.is_rdma && !one.is_gid && one.nic_class == nic_class) own.insert(network_of(one.address));
    if (own.empty()) continue;
    if (!common) {
      common = own;
    } else {
      std::erase_if(*common, [&](const IpNetwork& one) { return !own.contains(one); });
    }
  }
  return common && common->empty();
}

// The lanes of one network: number i joins every rank's i-th NIC in it, as long as none is slower than the first.
void add_lanes(std::vector<Lane>& lanes, const IpNetwork& network, std::vector<Ranked> members, bool is_rdma) {
  for (Ranked& ranked : members) {
    std::ranges::sort(ranked, [](const NicCandidate* a, const NicCandidate* b) {
      const auto key = [](const NicCandidate* one) { return std::tuple(-one->speed_gbps, !is_plain(one->kind)); };
      if (key(a) != key(b)) return key(a) < key(b);
      return a->nic != b->nic ? natural_less(a->nic, b->nic) : a->address.address < b->address.address;
    });
    std::set<std::string> wires;
    std::erase_if(ranked, [&](const NicCandidate* one) { return !wires.insert(one->wire).second; });
  }
  const auto count = std::ranges::min(members, {}, &Ranked::size).size();
  double speed = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Lane lane{network, NicClass::infiniband, is_rdma, members.front()[i]->speed_gbps, {}};
    for (const Ranked& ranked : members) {
      lane.nic_class = std::max(lane.nic_class, ranked[i]->nic_class);
      lane.speed_gbps = std::min(lane.speed_gbps, ranked[i]->speed_gbps);
      lane.candidates.push_back(ranked[i]);
    }
    if (i == 0) speed = lane.speed_gbps;
    if (lane.speed_gbps < speed) break;
    lanes.push_back(std::move(lane));
  }
}

// Every network in which all ranks have a NIC, of the candidates that `use` takes; by number.
template <class Use>
std::vector<Lane> shared_lanes(const Offers& offers, bool one_place, const Use& use) {
  std::map<std::tuple<IpNetwork, bool, std::string>, std::vector<Ranked>> networks;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    for (const NicCandidate& one : offers[rank].candidates) {
      if (!use(rank, one) || (one.nic_class == NicClass::loopback && !one_place)) continue;
      // Sockets of RoCE and of plain Ethernet reach each other; verbs do not, nor do the two RoCE versions.
      const std::string kind = one.is_rdma ? to_string(one.nic_class) : one.link_layer;
      auto& members = networks[{network_of(one.address), one.is_rdma, kind}];
      members.resize(offers.size());
      members[rank].push_back(&one);
    }
  }
  std::vector<Lane> lanes;
  for (auto& [key, members] : networks) {
    const auto& [network, is_rdma, kind] = key;
    if (std::ranges::any_of(members, &Ranked::empty) || has_clash(members, offers)) continue;
    const NicCandidate& first = *members.front().front();
    if (first.is_gid && is_ambiguous(network, first.nic_class, offers)) continue;
    add_lanes(lanes, network, std::move(members), is_rdma);
  }
  return lanes;
}

// A subnet of a port and its switch alone: what is behind it is routed.
bool is_point_to_point(const IpAddress& address) { return address.prefix_length >= (address.is_ipv4() ? 30 : 126); }

// Lanes of the RoCE v2 ports that have such a subnet each: number i joins every rank's i-th one. Such a network is
// built for ports that reach each other, as nothing else could use it.
void add_routed_lanes(std::vector<Lane>& lanes, const Offers& offers) {
  for (const bool is_ipv4 : {true, false}) {
    std::vector<Ranked> members(offers.size());
    for (std::size_t rank = 0; rank < offers.size(); ++rank)
      for (const NicCandidate& one : offers[rank].candidates)
        if (one.is_selected && one.is_rdma && !one.is_gid && one.nic_class == NicClass::roce_v2 &&
            one.address.is_ipv4() == is_ipv4 && is_point_to_point(one.address))
          members[rank].push_back(&one);
    if (std::ranges::any_of(members, &Ranked::empty)) continue;
    const IpNetwork network = network_of(members.front().front()->address);
    add_lanes(lanes, network, std::move(members), true);
    return;
  }
}

// The best lanes of these, as indices: the rails.
std::vector<std::size_t> choose_lanes(const std::vector<Lane>& lanes, std::optional<int> max_rails) {
  std::vector<SharedNetwork> networks;
  std::map<std::pair<std::size_t, std::string>, std::int64_t> wires;
  for (const Lane& lane : lanes) {
    SharedNetwork network{.nic_class = lane.nic_class, .is_rdma = lane.is_rdma};
    if (lane.speed_gbps > 0) network.rate_gbps = lane.speed_gbps;
    // Sockets: one rail unless the user wants more. RDMA: every port unless the user wants fewer.
    network.max_rails = lane.is_rdma ? max_rails : max_rails.value_or(1);
    for (std::size_t rank = 0; rank < lane.candidates.size(); ++rank) {
      const NicCandidate& one = *lane.candidates[rank];
      network.is_plain = network.is_plain && is_plain(one.kind);
      const auto next = static_cast<std::int64_t>(wires.size());
      network.wires.push_back(wires.emplace(std::pair(rank, one.wire), next).first->second);
    }
    networks.push_back(std::move(network));
  }
  auto ordered = best_first(networks);
  return ordered.empty() ? std::vector<std::size_t>{} : std::move(ordered.front());
}

void add_new(std::vector<std::string>& words, const std::string& word) {
  if (std::ranges::find(words, word) == words.end()) words.push_back(word);
}

std::vector<std::string> subnets_of(const std::vector<Lane>& lanes, const std::vector<std::size_t>& rails) {
  std::vector<std::string> subnets;
  for (const std::size_t rail : rails) add_new(subnets, network_of(lanes[rail].candidates.front()->address).text());
  return subnets;
}

std::string networks_text(const std::vector<Lane>& lanes, const std::vector<std::size_t>& rails) {
  const Lane& best = lanes[rails.front()];
  std::ostringstream speed;
  if (best.speed_gbps > 0) speed << " at " << best.speed_gbps << " Gbit/s";
  const bool is_routed = std::ranges::any_of(
      best.candidates, [&](const NicCandidate* one) { return network_of(one->address) != best.network; });
  return (is_routed ? "routed " : "") + class_text(best.nic_class) + " " + joined(subnets_of(lanes, rails)) +
         speed.str();
}

std::string reason_of(const std::vector<Lane>& lanes, const std::vector<std::size_t>& rails, std::size_t size) {
  const auto subnets = subnets_of(lanes, rails);
  std::vector<std::string> others;
  for (const Lane& lane : lanes)
    if (std::ranges::find(subnets, lane.network.text()) == subnets.end()) add_new(others, lane.text());
  return networks_text(lanes, rails) + ": the fastest network that all " + std::to_string(size) + " ranks share" +
         (others.empty() ? "" : "; not " + joined(others));
}

// By rank, what `of` gives for its candidate in each of the rails.
template <class Of>
auto by_rank(const std::vector<Lane>& lanes, const std::vector<std::size_t>& rails, std::size_t size, const Of& of) {
  std::vector<std::vector<decltype(of(*lanes.front().candidates.front()))>> result(size);
  for (const std::size_t rail : rails)
    for (std::size_t rank = 0; rank < size; ++rank) result[rank].push_back(of(*lanes[rail].candidates[rank]));
  return result;
}

NicAddress address_of(const NicCandidate& one) { return {one.nic, one.address.address}; }

std::string who_has_what(const Offers& offers) {
  std::vector<std::pair<std::string, std::vector<int>>> owners;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    for (const NicCandidate& one : offers[rank].candidates) {
      if (!one.is_selected) continue;
      const std::string network = class_text(one.nic_class) + " " + network_of(one.address).text();
      auto owner = std::ranges::find(owners, network, &decltype(owners)::value_type::first);
      if (owner == owners.end()) owner = owners.insert(owners.end(), {network, {}});
      if (owner->second.empty() || owner->second.back() != static_cast<int>(rank))
        owner->second.push_back(static_cast<int>(rank));
    }
  }
  return joined(owners, "; ", [](const auto& owner) { return owner.first + ": " + ranks_text(owner.second); });
}

// Ethernet with a gateway on every rank, each in its own subnet. Plain Ethernet first: which hosts an RDMA network's
// gateway reaches is not known.
std::optional<NicChoice> choose_routed(const Offers& offers) {
  for (const bool is_ipv4 : {true, false}) {
    NicChoice choice;
    for (const NicOffer& offer : offers) {
      const NicCandidate* best = nullptr;
      const auto key = [](const NicCandidate& one) {
        return std::tuple(one.nic_class != NicClass::ethernet, -one.speed_gbps);
      };
      for (const NicCandidate& one : offer.candidates) {
        if (!one.is_selected || one.is_rdma || !one.has_gateway || one.link_layer != "Ethernet" ||
            one.address.is_ipv4() != is_ipv4)
          continue;
        if (best == nullptr || key(one) < key(*best) || (key(one) == key(*best) && natural_less(one.nic, best->nic)))
          best = &one;
      }
      if (best != nullptr) choice.sockets.push_back({address_of(*best)});
    }
    if (choice.sockets.size() < offers.size()) continue;
    choice.reason = "routed Ethernet: the " + std::to_string(offers.size()) + " ranks share no network (" +
                    who_has_what(offers) + "), so each uses its Ethernet NIC with a gateway";
    return choice;
  }
  return std::nullopt;
}

[[noreturn]] void refuse(const Offers& offers) {
  const auto bare = std::ranges::find_if(offers, [](const NicOffer& one) { return one.candidates.empty(); });
  std::string message;
  ErrorContext context;
  if (bare != offers.end()) {
    context.peer = static_cast<int>(bare - offers.begin());
    context.host = bare->host;
    message = "rank " + std::to_string(*context.peer) + " on host " + bare->host +
              " has no NIC that is up and has an address (it has: " +
              (bare->inventory.empty() ? "no NIC at all" : bare->inventory) + ")";
  } else {
    message = "the " + std::to_string(offers.size()) + " ranks share no network (" + who_has_what(offers) +
              ") and not all have a gateway";
  }
  throw NicError(message +
                     ". Fix: give every rank an interface in one subnet, or choose interfaces that reach each other "
                     "with NicSelection(...) or HOLMES_NICS",
                 context);
}

std::optional<int> smallest_wish(const Offers& offers) {
  std::optional<int> smallest;
  for (const NicOffer& offer : offers)
    if (offer.max_rails) smallest = std::min(smallest.value_or(*offer.max_rails), *offer.max_rails);
  return smallest;
}

// Where all ranks are on one host and nothing is asked for.
std::optional<NicChoice> choose_loopback(const Offers& offers, bool one_place) {
  NicChoice choice;
  for (const NicOffer& offer : offers) {
    if (!one_place || offer.restricts || !offer.loopback) return std::nullopt;
    choice.sockets.push_back({*offer.loopback});
  }
  choice.reason = "loopback: all " + std::to_string(offers.size()) + " ranks are on one host";
  return choice;
}

// Sockets alone, over candidates that `use` takes.
template <class Use>
NicChoice choose_sockets(const Offers& offers, bool one_place, const Use& use) {
  const std::vector<Lane> lanes = shared_lanes(
      offers, one_place, [&](std::size_t rank, const NicCandidate& one) { return !one.is_rdma && use(rank, one); });
  if (const auto rails = choose_lanes(lanes, smallest_wish(offers)); !rails.empty())
    return {by_rank(lanes, rails, offers.size(), address_of), {}, reason_of(lanes, rails, offers.size())};
  if (auto routed = choose_routed(offers)) return std::move(*routed);
  if (!one_place) refuse(offers);
  NicChoice none;
  none.sockets.resize(offers.size());
  none.reason = "no NIC needed: all " + std::to_string(offers.size()) + " ranks are on one host";
  return none;
}

bool is_selected(std::size_t, const NicCandidate& one) { return one.is_selected; }

// What NCCL's handshakes use: the interfaces of its ports where all ranks share a network on these, else the best.
NicChoice choose_handshake(const Offers& offers, bool one_place, const std::vector<std::vector<std::string>>& nics) {
  const auto on_a_port = [&](std::size_t rank, const NicCandidate& one) {
    return std::ranges::find(nics[rank], one.nic) != nics[rank].end();
  };
  const auto any = [](std::size_t, const NicCandidate&) { return true; };
  const auto is_shared = [&](const auto& use) {
    return !shared_lanes(offers, one_place, [&](std::size_t rank, const NicCandidate& one) {
              return !one.is_rdma && use(rank, one);
            }).empty();
  };
  if (is_shared(on_a_port)) return choose_sockets(offers, one_place, on_a_port);
  return is_shared(is_selected) ? choose_sockets(offers, one_place, is_selected)
                                : choose_sockets(offers, one_place, any);
}

std::string rdma_text(const Offers& offers) {
  std::vector<std::string> ranks;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    std::vector<std::string> ports, classes;
    for (const NicCandidate& one : offers[rank].candidates)
      if (one.is_rdma && one.is_selected) add_new(ports, one.nic), add_new(classes, class_text(one.nic_class));
    ranks.push_back("rank " + std::to_string(rank) + " (host " + offers[rank].host +
                    "): " + (ports.empty() ? "no port" : joined(ports) + " (" + joined(classes) + ")"));
  }
  return joined(ranks, "; ");
}

bool has_rdma(const NicOffer& offer) {
  return std::ranges::any_of(offer.candidates, [](const NicCandidate& one) { return one.is_rdma && one.is_selected; });
}

// The RoCE v2 ports of NICs that reach each other by gateways; empty where not all of these are such.
std::vector<std::vector<std::string>> routed_ports(const Offers& offers, const NicChoice& routed) {
  std::vector<std::vector<std::string>> ports;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const auto found = std::ranges::find_if(offers[rank].candidates, [&](const NicCandidate& one) {
      return one.is_rdma && one.nic_class == NicClass::roce_v2 && address_of(one) == routed.sockets[rank].front();
    });
    if (found == offers[rank].candidates.end()) return {};
    ports.push_back({found->port});
  }
  return ports;
}

// `user`: of the ports, in words.
NicChoice choose_ports(const Offers& offers, bool one_place, const std::string& user) {
  const bool wants_rdma = std::ranges::any_of(offers, &NicOffer::wants_rdma);
  std::vector<Lane> lanes = shared_lanes(offers, one_place, [&](std::size_t, const NicCandidate& one) {
    return one.is_selected && (one.is_rdma || !wants_rdma);
  });
  if (std::ranges::none_of(lanes, &Lane::is_rdma)) add_routed_lanes(lanes, offers);
  const auto rails = choose_lanes(lanes, smallest_wish(offers));
  if (!rails.empty() && lanes[rails.front()].is_rdma) {
    const auto nics = by_rank(lanes, rails, offers.size(), [](const NicCandidate& one) { return one.nic; });
    NicChoice choice = choose_handshake(offers, one_place, nics);
    choice.ports = by_rank(lanes, rails, offers.size(), [](const NicCandidate& one) { return one.port; });
    choice.reason = reason_of(lanes, rails, offers.size()) + "; " + user + " uses " +
                    class_text(lanes[rails.front()].nic_class) + ", " + std::to_string(rails.size()) +
                    (rails.size() == 1 ? " port" : " ports") + " of each rank, its handshakes " + choice.reason;
    return choice;
  }
  if (rails.empty()) {
    auto routed = choose_routed(offers);
    if (routed && !(routed->ports = routed_ports(offers, *routed)).empty()) {
      routed->reason += "; " + user + " uses roce";
      return std::move(*routed);
    }
  }
  if (wants_rdma) {
    const auto without = std::ranges::find_if_not(offers, has_rdma);
    const auto bad = without == offers.end() ? offers.begin() : without;
    throw NicError(
        "InfiniBand or RoCE is asked for, but not all ranks have active ports of one class that they share: " +
            rdma_text(offers) +
            ". Fix: choose a class that all have, or leave out what asks for RDMA (the class, or transport rdma)",
        {.peer = static_cast<int>(bad - offers.begin()), .host = bad->host});
  }
  NicChoice choice = choose_sockets(offers, one_place, is_selected);
  choice.reason += "; NCCL uses sockets";
  const bool shares_rdma = std::ranges::any_of(lanes, &Lane::is_rdma);
  if (shares_rdma) {
    choice.reason += ", which are faster here than RDMA";
  } else if (std::ranges::any_of(offers, has_rdma)) {
    choice.reason += ", as not all ranks share RDMA ports of one kind (" + rdma_text(offers) + ")";
  }
  return choice;
}

// Why no RDMA ports are taken beside sockets, where some rank has one and nobody asked for them; else the lanes that
// are, in `rails`.
std::string take_ports_beside(const Offers& offers, NicChoice& choice) {
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const NicOffer& offer = offers[rank];
    if (offer.no_rdma.empty() && has_rdma(offer)) continue;
    return "rank " + std::to_string(rank) + " (host " + offer.host + ")" +
           (offer.no_rdma.empty() ? " has no active RDMA port that it may use" : ": " + offer.no_rdma);
  }
  if (const int streams = std::ranges::min(offers, {}, &NicOffer::streams).streams; streams > 1)
    return "streams=" + std::to_string(streams) + " is asked for, which only TCP has";
  std::vector<Lane> lanes = shared_lanes(offers, false, is_selected);
  if (std::ranges::none_of(lanes, &Lane::is_rdma)) add_routed_lanes(lanes, offers);
  if (std::ranges::none_of(lanes, &Lane::is_rdma))
    return "not all ranks share RDMA ports of one kind (" + rdma_text(offers) + ")";
  const auto rails = choose_lanes(lanes, smallest_wish(offers).value_or(1));
  if (!lanes[rails.front()].is_rdma) return "sockets are faster here";
  choice.ports = by_rank(lanes, rails, offers.size(), [](const NicCandidate& one) { return one.port; });
  choice.reason += "; RDMA over " + networks_text(lanes, rails);
  return {};
}

// Sockets as without RDMA, which serve where the ports turn out not to reach each other.
NicChoice choose_automatic(const Offers& offers, bool one_place) {
  NicChoice choice = choose_sockets(offers, one_place, is_selected);
  if (one_place || std::ranges::none_of(offers, has_rdma)) return choice;
  if (const std::string refusal = take_ports_beside(offers, choice); !refusal.empty())
    choice.reason += "; not RDMA: " + refusal;
  return choice;
}

}  // namespace

std::vector<NicCandidate> socket_candidates(const Nic& nic, const std::string& subnet) {
  std::vector<NicCandidate> found;
  for (const IpAddress& address : nic.addresses)
    if (in_subnet(address, subnet)) found.push_back(candidate(nic, address));
  return found;
}

std::vector<NicCandidate> rdma_candidates(const Nic& nic, const std::string& subnet) {
  const bool is_infiniband = nic.nic_class == NicClass::infiniband;
  if (nic.hca.empty() || !nic.is_up || (!is_infiniband && !is_roce(nic.nic_class))) return {};
  std::vector<NicCandidate> found = socket_candidates(nic, subnet);
  // InfiniBand needs no IP address; RoCE without one reaches the ports of its own Ethernet.
  if (subnet.empty() && (is_infiniband || found.empty())) {
    const auto gid = std::ranges::find(nic.gids, nic.gid_index.value_or(0), &Gid::index);
    found.push_back(candidate(nic, {gid == nic.gids.end() ? "fe80::" : gid->gid, gid_prefix_length}));
    found.back().is_gid = true;
  }
  for (NicCandidate& one : found) one.is_rdma = true, one.port = nic.port_name();
  return found;
}

NicChoice choose_nics(const std::vector<NicOffer>& offers, Carrier carrier) {
  check_offers(offers);
  const bool one_place =
      std::ranges::all_of(offers, [&](const NicOffer& one) { return one.place == offers.front().place; });
  const bool spans_clusters =
      std::ranges::any_of(offers, [&](const NicOffer& one) { return one.cluster != offers.front().cluster; });
  if (spans_clusters && (carrier == Carrier::rdma || carrier == Carrier::automatic)) carrier = Carrier::tcp;
  // Ranks of one host share memory without a port; where they may not, the set-up says so (check_rdma).
  const bool takes_port = carrier == Carrier::rdma && (!one_place || std::ranges::any_of(offers, has_rdma));
  auto loopback = takes_port ? std::nullopt : choose_loopback(offers, one_place);
  if (loopback) {
    if (carrier == Carrier::nccl) loopback->reason += "; NCCL uses sockets";
    return std::move(*loopback);
  }
  if (carrier == Carrier::tcp) return choose_sockets(offers, one_place, is_selected);
  if (carrier == Carrier::automatic) return choose_automatic(offers, one_place);
  return choose_ports(offers, one_place, carrier == Carrier::nccl ? "NCCL" : "it");
}

}  // namespace holmes
