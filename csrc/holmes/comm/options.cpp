#include "holmes/comm/options.hpp"

#include "holmes/core/error.hpp"

namespace holmes {

Transport transport_from_name(const std::string& name) {
  if (name == "auto") return Transport::automatic;
  if (name == "tcp") return Transport::tcp;
  if (name == "shm") return Transport::shm;
  throw UsageError("transport '" + name + "' does not exist; use one of: auto, tcp, shm");
}

}  // namespace holmes
