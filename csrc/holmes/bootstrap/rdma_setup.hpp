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

// The HCA ports that this rank's data uses: those named, else those of its NICs; empty: one of these has none.
std::vector<std::string> rdma_ports_of(const CommunicatorOptions& options);

// Throws where the ranks' ports cannot carry what is between them. All ranks see the same records, hence the same
// error.
void check_rdma(const std::vector<RankInfo>& records);

// Makes the channels of every pair of `mesh` that shares no memory, over the connections it has: each pair swaps
// addresses and proves the paths, one for each of `devices`, in both directions. As MeshBuilder::connect; throws
// UnreachableError, NicError, ProtocolError, SystemError.
void connect_rdma(Mesh& mesh, const CommunicatorOptions& options,
                  const std::vector<std::shared_ptr<const RdmaDevice>>& devices, Clock::time_point deadline,
                  const std::function<void()>& look_around);

}  // namespace holmes
