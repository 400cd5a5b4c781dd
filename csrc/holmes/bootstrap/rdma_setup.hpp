// RdmaSetup: the queue pairs of a mesh whose data goes by RDMA.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "holmes/bootstrap/mesh.hpp"
#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/transport/rdma/device.hpp"

namespace holmes {

// The HCA port that this rank's data uses: the one named, else that of its first NIC; empty: it has none.
std::string rdma_port_of(const CommunicatorOptions& options);

// Throws where the ranks' ports cannot carry what is between them. All ranks see the same records, hence the same
// error.
void check_rdma(const std::vector<RankInfo>& records);

// Makes the channels of every pair of `mesh` that shares no memory, over the connections it has: each pair swaps
// addresses and proves the path in both directions. As MeshBuilder::connect; throws UnreachableError, NicError,
// ProtocolError, SystemError.
void connect_rdma(Mesh& mesh, const CommunicatorOptions& options, const std::shared_ptr<const RdmaDevice>& device,
                  Clock::time_point deadline, const std::function<void()>& look_around);

}  // namespace holmes
