// What ranks read from the store, and from each other before NCCL is called. First byte: which of them.
#include "fuzz.hpp"
#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/nccl/agreement.hpp"

using namespace holmes;
using namespace holmes::fuzz;

namespace {
const Seal seal{"", "world/rank/1"};
}

std::vector<std::string> fuzz::seeds() {
  RankInfo record;
  record.host = "a0";
  record.machine = "boot:1:2";
  record.user = "0";
  record.unix_token = "holmes-0123";
  record.made_secret = std::string(64, 's');
  record.priority = 3;
  record.turn = 15;
  record.cluster = "1";
  record.rdma_ports = {{"mlx5_0:1", "RoCE v2"}, {"mlx5_1:1", "RoCE v2"}};
  record.no_rdma = "asks for tls='all'";
  record.rails = {{"eth0", "10.0.0.1", 4000, 4001}, {"ib0", "fd00::1", 5, 6}};
  record.cluster_rails = 1;
  Failure failure{ErrorKind::nic, "no such NIC", {}};
  failure.context = {.rank = 1, .peer = 2, .host = "b1", .nic = "eth7", .system_errno = 19};
  const std::string separator = "\x1f";
  return {'\0' + encode(record, seal), '\0' + encode(failure), '\1' + encode(failure), '\1' + encode_success(),
          "\2a0" + separator + "22707" + separator + "IB" + separator + "InfiniBand" + separator + separator + "0" +
              separator + separator};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Input input(bytes, size);
  const auto mode = input.byte();
  try {
    if (mode % 3 == 0) {
      const auto record = decode_rank(input.rest(), "rank 1", seal);
      REQUIRE(record.cluster_rails <= record.rails.size());
      REQUIRE(encode(decode_rank(encode(record, seal), "rank 1", seal), seal) == encode(record, seal));
    } else if (mode % 3 == 1) {
      const auto outcome = decode_outcome(input.rest(), "rank 1");
      if (outcome) outcome->raise();
    } else {
      nccl::check_agreement({nccl::decode_report(input.rest()), {}});
    }
  } catch (const HolmesError&) {
  }
  return 0;
}
