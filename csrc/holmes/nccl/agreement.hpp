// Agreement: what the ranks of an NCCL communicator tell each other before NCCL is called, and what must be equal.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "holmes/comm/communicator.hpp"

namespace holmes::nccl {

// Of one rank. NCCL finds none of these differences at set-up; some it finds in the first operation, some never.
struct RankReport {
  std::string host;
  int version = 0;         // of NCCL
  std::string net;         // net_name of its profile
  std::string link_layer;  // of its HCAs; empty for Socket
  // Why this rank cannot take part, with what its error carries; empty: it can.
  std::string error;
  int error_kind = 0;
  std::string error_nic;
};

// What a rank sent. Throws ProtocolError where it makes no sense.
RankReport decode_report(const std::string& text);

// Everybody's report, by rank. Collective over `control`.
std::vector<RankReport> exchange_reports(Communicator& control, const RankReport& own, Duration timeout);

// Throws, alike on all ranks: the first rank's error, with its type; UsageError where NCCL versions differ; NicError
// where transports or link layers do. Names the ranks and their hosts.
void check_agreement(const std::vector<RankReport>& reports);

}  // namespace holmes::nccl
