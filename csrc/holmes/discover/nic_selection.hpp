// NicSelection: which NICs a group uses, as HOLMES_NICS says it or the caller; Python asks it too.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/nic_choice.hpp"

namespace holmes {

// Which NICs of a host may be used. Conditions add up; none at all means whichever is the fastest that all ranks share.
struct NicSelection {
  std::vector<std::string>
      names;                     // interfaces, HCA ports or HCAs, as glob patterns; each host has one of them at least
  std::string nic_class;         // "infiniband", "roce", ...; empty: any
  std::string subnet;            // only NICs with an address in it; empty: any
  std::optional<int> max_rails;  // absent: no wish
  int streams = 1;               // connections over each NIC
  bool fastest = false;          // what also happens where nothing is said

  // "class:roce", "subnet:10.1.0.0/16", "rails:2", "streams:2", "fastest" and names, with commas between. Throws
  // UsageError on a wrong value.
  static NicSelection parse(const std::string& text);
  // Of HOLMES_NICS.
  static NicSelection from_env();
  // Throws UsageError on a value that a field cannot have.
  void check() const;

  // Whether a class, a name or a subnet is asked for.
  bool restricts() const { return !nic_class.empty() || !names.empty() || !subnet.empty(); }
  // Those among the `nics` of this host that have a name and class of it, in any state. Loopback is left out unless
  // something is asked for. Throws NicError where an asked-for NIC does not exist.
  std::vector<Nic> matching(const std::vector<Nic>& nics) const;
  // Those that TCP can use besides: up, with an address, which comes first; with a subnet one in it, else none that is
  // link-local. Throws NicError where an asked-for NIC does not exist, is down or has no address; where nothing is
  // asked for, there may be none.
  std::vector<Nic> resolve(const std::vector<Nic>& nics) const;
  // What this host, which has `nics`, brings to a choice; host, place and cluster are the caller's. Throws as resolve,
  // but where NCCL has ports that need no address.
  NicOffer offer(const std::vector<Nic>& nics, Carrier carrier) const;
};

}  // namespace holmes
