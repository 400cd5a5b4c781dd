// NicSelection: what HOLMES_NICS says, for programs without Python; holmes_comm/nic_selection.py reads the same words.
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

  // "class:roce", "subnet:10.1.0.0/16", "rails:2", "streams:2", "fastest" and names, with commas between. Throws
  // UsageError on a wrong value.
  static NicSelection parse(const std::string& text);
  // Of HOLMES_NICS.
  static NicSelection from_env();

  // Whether a class, a name or a subnet is asked for.
  bool restricts() const { return !nic_class.empty() || !names.empty() || !subnet.empty(); }
  // What this host, which has `nics`, brings to a choice for sockets; host and place are the caller's. Throws NicError
  // where an asked-for NIC does not exist, is down or has no address.
  NicOffer offer(const std::vector<Nic>& nics) const;
};

}  // namespace holmes
