#include "holmes/core/options.hpp"

#include "holmes/core/error.hpp"

namespace holmes {

void check_place(int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size)
    throw UsageError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                     " is not possible; size must be at least 1 and rank from 0 to size - 1");
}

Transport transport_from_name(const std::string& name) {
  if (name == "auto") return Transport::automatic;
  if (name == "tcp") return Transport::tcp;
  if (name == "shm") return Transport::shm;
  throw UsageError("transport '" + name + "' does not exist; use one of: auto, tcp, shm");
}

std::string name(Transport transport) {
  return transport == Transport::automatic ? "auto" : transport == Transport::tcp ? "tcp" : "shm";
}

TlsMode tls_mode_from_name(const std::string& name) {
  if (name == "off") return TlsMode::off;
  if (name == "clusters") return TlsMode::clusters;
  if (name == "all") return TlsMode::all;
  throw UsageError("tls '" + name + "' does not exist; use one of: off, clusters, all");
}

std::string name(TlsMode mode) { return mode == TlsMode::off ? "off" : mode == TlsMode::clusters ? "clusters" : "all"; }

}  // namespace holmes
