// Network: what carries NCCL's traffic over some NICs of this process: these, the secret, and the store at which the
// two ends of a connection meet.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/comm/host_communicator.hpp"
#include "holmes/discover/nic_selection.hpp"
#include "nccl_net/abi.hpp"

namespace holmes::nccl_net {

// What the receiving side gives to the sending one, through NCCL. Both run the same version of Holmes on machines of
// one byte order.
struct Handle {
  static constexpr std::uint32_t right_magic = 0x314e4d48;  // "HMN1"
  std::uint32_t magic = right_magic;
  std::uint32_t port = 0;          // of the store
  std::uint64_t listener = 0;      // its number in the receiving process
  std::array<char, 32> token{};    // of that process, random; the store serves only who has it
  std::array<char, 64> address{};  // of the store; ends with a zero
  std::uint64_t pending = 0;       // the sending side's own note: the set-up that is under way

  // Throws ProtocolError where no `make_handle` of this version made it.
  void check() const;
  bool operator==(const Handle&) const = default;
};
static_assert(sizeof(Handle) <= handle_bytes);

// What a process says to be its number in the job; nothing where it says none.
std::optional<int> job_rank_from(const std::string& text);

// Two processes, connected: a communicator of two, in which the receiving side is rank 0.
struct Pair {
  std::shared_ptr<HostCommunicator> communicator;
  std::optional<int> peer_rank;  // in the job, where both know theirs
};

// One for each selection of NICs in use. Thread-safe.
class Network {
public:
  // Of HOLMES_NICS, made by the first call that succeeds and never destroyed. Throws where a variable or a NIC
  // selection is wrong, or what is selected is not there.
  static Network& get();
  // For a communicator of NCCL: of what `assign` said for its id, else as `get`. Throws as that.
  static Network& of_comm(std::uint64_t comm_id);
  // `nics`, as in HOLMES_NICS, are those of the communicator with this id from now on; empty: HOLMES_NICS's again.
  // Throws UsageError where they are no NIC selection.
  static void assign(std::uint64_t comm_id, const std::string& nics);
  // How many communicators with this id have taken what `assign` said, since then.
  static int uses(std::uint64_t comm_id);
  // Throws what a communicator that `assign` says these of would meet in `of_comm`.
  static void check(const std::string& nics) { made_for(nics); }
  // The one that was made first: what NCCL is told of the plugin's device, which it asks for once.
  static Network& first();

  // "eth0 10.1.0.1, eth1 10.2.0.1".
  const std::string& nics_text() const { return nics_text_; }
  int speed_mbps() const { return speed_mbps_; }
  // In sysfs, of the first NIC; null where it has none.
  const char* pci_path() const { return pci_path_.empty() ? nullptr : pci_path_.c_str(); }

  // For a new listener. Serves the store from the first one on.
  Handle make_handle();
  // The two ends of one connection. Both block.
  Pair accept(const Handle& own);
  Pair connect(const Handle& of_peer);

private:
  explicit Network(NicSelection selection);
  static Network& made_for(const std::string& nics);
  std::shared_ptr<Store> served_store();
  Pair meet(const std::shared_ptr<Store>& store, int rank, const Handle& handle);
  // Of the process with this token: only who has the token, and the job's secret where there is one, can make it.
  std::string secret_for(const Handle& handle) const;
  NicOffer make_offer() const;
  std::vector<int> await_peer(Store& store, const std::string& name, int rank, const Handle& handle) const;

  NicSelection selection_;
  Transport transport_;
  std::string cluster_;
  std::optional<std::string> job_secret_;
  Duration connect_timeout_;
  bool is_polled_ = true;  // NCCL's thread moves the bytes when it asks for them, not the I/O threads
  std::string nics_text_, pci_path_, nic_, address_;
  int speed_mbps_ = 0;
  const std::string token_;

  std::mutex mutex_;
  std::shared_ptr<TcpStore> store_;
  std::uint64_t listeners_ = 0;
};

}  // namespace holmes::nccl_net
