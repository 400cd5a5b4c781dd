// A ConnectionInfo as a Python dict. Shared by both modules (_C and _c10d).
#pragma once

#include <pybind11/pybind11.h>

#include "holmes/core/connection_info.hpp"

namespace holmes {

inline pybind11::dict to_dict(const ConnectionInfo& info) {
  using namespace pybind11::literals;
  return pybind11::dict(
      "peer"_a = info.peer, "host"_a = info.host, "transport"_a = info.transport, "purpose"_a = info.purpose,
      "interface"_a = info.interface, "local_address"_a = info.local_address, "remote_address"_a = info.remote_address,
      "device_bound"_a = info.device_bound, "retired"_a = info.is_retired, "sent_bytes"_a = info.sent_bytes,
      "received_bytes"_a = info.received_bytes, "retransmitted_segments"_a = info.retransmitted_segments,
      "resent_chunks"_a = info.resent_chunks, "encryption"_a = info.encryption);
}

}  // namespace holmes
