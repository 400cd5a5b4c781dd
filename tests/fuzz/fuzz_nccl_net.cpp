// What NCCL's network plugin reads of a peer itself: the handle that NCCL brings, the number in the job. First byte:
// which of them. (Store, handshake, NIC offers and messages are the library's, with fuzzers of their own.)
#include "fuzz.hpp"
#include "holmes/core/error.hpp"
#include "holmes/transport/socket.hpp"
#include "nccl_net/network.hpp"

using namespace holmes;
using namespace holmes::fuzz;
using nccl_net::Handle;

namespace {

void read_handle(const std::string& text) {
  Handle handle;
  std::memcpy(static_cast<void*>(&handle), text.data(), std::min(text.size(), sizeof handle));
  try {
    handle.check();
  } catch (const ProtocolError&) {
    return;
  }
  REQUIRE(handle.magic == Handle::right_magic && handle.port > 0 && handle.port < 65536);
  const std::string address = handle.address.data();
  REQUIRE(address.size() < handle.address.size());
  REQUIRE(!SocketAddress::parse(address, static_cast<std::uint16_t>(handle.port)).host().empty());
}

void read_rank(const std::string& text) {
  const auto rank = nccl_net::job_rank_from(text);
  REQUIRE(!rank || (*rank >= 0 && text.find_first_not_of("0123456789") == std::string::npos));
}

}  // namespace

std::vector<std::string> fuzz::seeds() {
  std::vector<std::string> all;
  for (const std::string address : {"127.0.0.1", "fd00::1", "fe80::1%lo", "a-host"}) {
    Handle handle;
    handle.port = 1234;
    handle.address = {};
    address.copy(handle.address.data(), address.size());
    all.push_back('\0' + std::string(reinterpret_cast<const char*>(&handle), sizeof handle));
  }
  for (const std::string rank : {"0", "12", "-1", "2147483648", "1 "}) all.push_back('\1' + rank);
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Input input(bytes, size);
  const auto which = input.byte();
  if (which % 2 == 0)
    read_handle(input.rest());
  else
    read_rank(input.rest());
  return 0;
}
