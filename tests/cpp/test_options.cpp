// CommunicatorOptions: every field is in the list that the bindings go by.
#include "holmes/core/options.hpp"

#include "check.hpp"

using namespace holmes;

int main() {
  // As many names as there are fields, or this does not compile.
  const CommunicatorOptions options;
  [[maybe_unused]] const auto& [rank, size, name, nics, rdma_ports, clusters, cluster_names, cluster_nics,
                                between_clusters, hierarchical_min_bytes, job_rank, labels, transport, timeout,
                                connect_timeout, secret, tls, integrity, integrity_digest_every, spin_us,
                                local_completion, priority, turn, dscp, wide_min_ranks] = options;
  constexpr int field_count = 25;
  int visited = 0;
  visit_fields([&](const char*, auto field) {
    CommunicatorOptions copy;
    CHECK(copy.*field == options.*field);
    ++visited;
  });
  CHECK(visited == field_count);
  CHECK(options == CommunicatorOptions{});
  return test::result("test_options");
}
