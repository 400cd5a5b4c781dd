// RdmaSetup: the queue pairs of a mesh whose data goes by RDMA.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holmes/bootstrap/mesh.hpp"
#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/transport/rdma/device.hpp"

namespace holmes {

// The HCA ports that this rank's data uses: those named, else those of its NICs (in its cluster where the group spans
// several); empty: one of these has none.
std::vector<std::string> rdma_ports_of(const CommunicatorOptions& options);

// Why a rank with Transport::automatic takes no RDMA, whatever ports it has, as what follows its name: "asks for
// tls='all', ...". Empty: nothing against it.
std::string rdma_objection(const CommunicatorOptions& options, const Env& env);

using RdmaDevices = std::vector<std::shared_ptr<const RdmaDevice>>;

// Opens the ports of this rank and tells in `own` of them. Where they cannot be used: throws as RdmaDevice; with
// Transport::automatic says so in `own`. Empty with other transports, or without ports.
RdmaDevices open_rdma(const CommunicatorOptions& options, const Env& env, RankInfo& own);

// Throws where the ranks' ports cannot carry what is between them. All ranks see the same records, hence the same
// error.
void check_rdma(const std::vector<RankInfo>& records);

// Makes the channels of every pair of `mesh` in this rank's cluster that shares no memory, over the connections it has:
// each pair swaps addresses and proves the paths, one for each of `devices`, in both directions. As
// MeshBuilder::connect; throws UnreachableError, NicError, ProtocolError, SystemError. With Transport::automatic all
// ranks of it go on over TCP where one cannot, and are told why here, all the same; nothing: no rank has any, or it is
// in use.
std::optional<std::string> connect_rdma(Mesh& mesh, const std::vector<RankInfo>& records,
                                        const CommunicatorOptions& options, const RdmaDevices& devices,
                                        Clock::time_point deadline, const std::function<void()>& look_around);

}  // namespace holmes
