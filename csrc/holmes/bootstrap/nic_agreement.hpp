// NicAgreement: how the ranks of a group agree on the NICs they use (docs/nics.md).
#pragma once

#include <string>
#include <vector>

#include "holmes/bootstrap/store_exchange.hpp"
#include "holmes/core/options.hpp"
#include "holmes/discover/nic_choice.hpp"

namespace holmes {

// What the ranks agreed on.
struct NicAgreement {
  std::vector<NicAddress> sockets;    // this rank's rails, in the same order on every rank; all again for each stream
  std::vector<std::string> ports;     // this rank's HCA ports, over RDMA
  std::string reason;                 // why these, in words
  std::vector<std::string> clusters;  // that every rank names
};

// Chooses together with the other ranks. Collective over `asked` (HOLMES_CONNECT_TIMEOUT_S wins over its timeout).
// Throws on every rank what choose_nics throws, and TimeoutError where a rank did not take part.
NicAgreement agree_nics(const Meeting& asked, const NicOffer& offer, Carrier carrier);

// What moves the bytes of a communicator with these options.
Carrier carrier_of(const CommunicatorOptions& options);

// At level info, a line: which rank of the group this is, the NICs that `options` gives it, and why.
void log_nics(const CommunicatorOptions& options, const std::string& reason);

// Gives `options`, which name no NICs, those of agree_nics among all of this host. Collective.
void set_default_nics(Store& store, CommunicatorOptions& options);

}  // namespace holmes
