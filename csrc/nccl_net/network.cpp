#include "nccl_net/network.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>

#include "holmes/bootstrap/nic_agreement.hpp"
#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/bootstrap/secret.hpp"
#include "holmes/bootstrap/sha256.hpp"
#include "holmes/core/text.hpp"
#include "holmes/discover/host.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes::nccl_net {
namespace {

constexpr Duration default_connect_timeout = std::chrono::seconds(60);
// NCCL has no deadline for a message; a peer that is gone ends it.
constexpr Duration no_deadline = std::chrono::hours(24 * 3650);
constexpr int receiver = 0, sender = 1;
constexpr int usual_speed_mbps = 10'000;  // of a NIC that does not tell, as NCCL has it

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

std::string text_of(const Digest& digest) { return to_hex({digest.begin(), digest.end()}); }

// Each tells the other its rank in the job. Empty where one of them has none.
std::vector<int> exchange_labels(Store& store, const std::string& name, int rank, Duration timeout) {
  const auto key = [&](int of) { return name + "/job_rank/" + std::to_string(of); };
  const std::string own = variable("RANK");
  store.set(key(rank), own);
  const auto mine = job_rank_from(own);
  const auto other = job_rank_from(store.get(key(1 - rank), timeout));
  if (!mine || !other || *mine == *other) return {};
  return rank == receiver ? std::vector{*mine, *other} : std::vector{*other, *mine};
}

// The store of one connection's set-up, seen by the process that serves it. What it held of it is given up when nobody
// reads it any more: a job may make many thousand connections.
class SetupStore final : public Store {
public:
  explicit SetupStore(std::shared_ptr<Store> served) : served_(std::move(served)) {}

  void set(const std::string& key, const std::string& value) override { served_->set(noted(key), value); }
  std::string get(const std::string& key, Duration timeout) override { return served_->get(noted(key), timeout); }
  void wait(const std::string& key, Duration timeout) override { served_->wait(noted(key), timeout); }

  void give_up() {
    std::lock_guard lock(mutex_);
    for (const std::string& key : keys_) served_->set(key, "");
    keys_.clear();
  }

private:
  const std::string& noted(const std::string& key) {
    std::lock_guard lock(mutex_);
    keys_.insert(key);
    return key;
  }

  const std::shared_ptr<Store> served_;
  std::mutex mutex_;
  std::set<std::string> keys_;
};

std::shared_ptr<TcpStore> serve(const std::string& address, const std::string& secret) {
  const auto range = Env::read().port_range;
  for (std::uint32_t port = range ? range->first : 0; range && port < range->second; ++port) {
    try {
      return std::make_shared<TcpStore>(address, static_cast<std::uint16_t>(port), true, default_connect_timeout,
                                        secret);
    } catch (const SystemError&) {  // taken; the last one says so
    }
  }
  return std::make_shared<TcpStore>(address, range ? range->second : std::uint16_t{0}, true, default_connect_timeout,
                                    secret);
}

}  // namespace

std::optional<int> job_rank_from(const std::string& text) {
  std::uint32_t rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (error != std::errc{} || end != text.data() + text.size() || rank > std::numeric_limits<int>::max())
    return std::nullopt;
  return static_cast<int>(rank);
}

void Handle::check() const {
  bool is_right =
      magic == right_magic && port > 0 && port <= std::numeric_limits<std::uint16_t>::max() && address.back() == '\0';
  try {
    if (is_right) SocketAddress::parse(address.data(), static_cast<std::uint16_t>(port));
  } catch (const UsageError&) {
    is_right = false;
  }
  if (!is_right)
    throw ProtocolError(
        "what NCCL brought from the peer is no handle of this plugin; set NCCL_NET_PLUGIN=holmes, and install the same "
        "version of Holmes, on every host");
}

namespace {

// Of this process; never destroyed, as the engine's threads live on.
struct Networks {
  std::mutex mutex;
  std::map<std::string, Network*> made;  // by the selection's text
  Network* first = nullptr;
  struct Assigned {
    std::string nics;
    int uses = 0;
  };
  std::map<std::uint64_t, Assigned> assigned;  // by a communicator's id

  static Networks& get() {
    static Networks* const all = new Networks();
    return *all;
  }
};

}  // namespace

Network& Network::get() { return made_for(variable("HOLMES_NICS")); }

Network& Network::of_comm(std::uint64_t comm_id) {
  Networks& all = Networks::get();
  std::unique_lock lock(all.mutex);
  const auto found = all.assigned.find(comm_id);
  if (found == all.assigned.end()) return lock.unlock(), get();
  ++found->second.uses;
  const std::string nics = found->second.nics;
  lock.unlock();
  return made_for(nics);
}

void Network::assign(std::uint64_t comm_id, const std::string& nics) {
  NicSelection::parse(nics).check();
  Networks& all = Networks::get();
  std::lock_guard lock(all.mutex);
  if (nics.empty())
    all.assigned.erase(comm_id);
  else
    all.assigned[comm_id] = {nics};
}

int Network::uses(std::uint64_t comm_id) {
  Networks& all = Networks::get();
  std::lock_guard lock(all.mutex);
  const auto found = all.assigned.find(comm_id);
  return found == all.assigned.end() ? 0 : found->second.uses;
}

Network& Network::first() {
  Networks& all = Networks::get();
  {
    std::lock_guard lock(all.mutex);
    if (all.first != nullptr) return *all.first;
  }
  return get();
}

Network& Network::made_for(const std::string& nics) {
  Networks& all = Networks::get();
  std::lock_guard lock(all.mutex);
  Network*& network = all.made[nics];
  if (network == nullptr) network = new Network(NicSelection::parse(nics));
  if (all.first == nullptr) all.first = network;
  return *network;
}

Network::Network(NicSelection selection)
    : selection_(std::move(selection)),
      transport_(transport_from_name(variable("HOLMES_TRANSPORT").empty() ? "auto" : variable("HOLMES_TRANSPORT"))),
      cluster_(variable("HOLMES_CLUSTER")),
      token_(random_bytes(sizeof(Handle::token))) {
  const Env env = Env::read();  // every wrong value is told now
  tls_mode_from_name(env.tls);
  job_secret_ = given_secret("", env);
  is_polled_ = env.io_threads == 1;
  connect_timeout_ = env.connect_timeout.value_or(default_connect_timeout);
  const auto nics = discover_nics();
  NicOffer offer = selection_.offer(nics, Carrier::tcp);
  // The rule, as if all peers had the same NICs.
  offer.restricts = true;
  offer.host = host_name();
  std::vector<NicAddress> rails = choose_nics({offer}, Carrier::tcp).sockets.front();
  if (rails.empty() && offer.loopback) rails = {*offer.loopback};
  if (rails.empty())
    throw NicError("host " + offer.host + " has no NIC that is up and has an address (it has: " + offer.inventory +
                       "); bring one up",
                   {.host = offer.host});
  double gbps = 0;
  for (const NicAddress& rail : rails) {
    add_word(nics_text_, rail.nic + " " + rail.address);
    const auto nic = std::ranges::find(nics, rail.nic, &Nic::name);
    gbps += nic->speed_gbps.value_or(usual_speed_mbps / 1000.0);
    if (pci_path_.empty() && !nic->pci_path.empty()) pci_path_ = default_sysfs_root() + "/" + nic->pci_path;
  }
  speed_mbps_ = static_cast<int>(std::lround(gbps * 1000));
  address_ = rails.front().address;
  nic_ = rails.front().nic;
  if (address_.size() >= sizeof(Handle::address))
    throw NicError("address " + address_ + " is longer than NCCL's handles have room for", {.nic = rails.front().nic});
}

std::string Network::secret_for(const Handle& handle) const {
  const std::string what = "holmes nccl-net" + std::string(handle.token.data(), handle.token.size());
  return text_of(hmac_sha256(job_secret_.value_or("no secret of the job"), what));
}

std::shared_ptr<Store> Network::served_store() {
  std::lock_guard lock(mutex_);
  return store_;
}

Handle Network::make_handle() {
  Handle handle;
  std::ranges::copy(token_, handle.token.begin());
  std::ranges::copy(address_, handle.address.begin());
  std::lock_guard lock(mutex_);
  if (!store_) store_ = serve(address_, secret_for(handle));
  handle.port = store_->port();
  handle.listener = ++listeners_;
  return handle;
}

Pair Network::accept(const Handle& own) {
  const auto store = std::make_shared<SetupStore>(served_store());
  Pair pair = meet(store, receiver, own);
  store->give_up();  // the sender has entered the communicator's first operation: it has read everything
  return pair;
}

Pair Network::connect(const Handle& of_peer) {
  const auto store = std::make_shared<TcpStore>(of_peer.address.data(), static_cast<std::uint16_t>(of_peer.port), false,
                                                connect_timeout_, secret_for(of_peer));
  return meet(store, sender, of_peer);
}

// What the peer is called, see exchange_labels.
std::vector<int> Network::await_peer(Store& store, const std::string& name, int rank, const Handle& handle) const {
  try {
    return exchange_labels(store, name, rank, connect_timeout_);
  } catch (const TimeoutError&) {
    const std::string peer = rank == receiver ? "sending" : "receiving";
    throw TimeoutError("host " + host_name() + " on NIC " + nics_text_ + ": the " + peer + " process has not come to " +
                           handle.address.data() + ":" + std::to_string(handle.port) + " within " +
                           seconds_text(connect_timeout_) +
                           "; check that it still runs and that its host reaches that address",
                       {.host = host_name(), .nic = nic_});
  }
}

// A host that cannot bring its NICs says so to the peer.
NicOffer Network::make_offer() const {
  NicOffer offer;
  try {
    offer = selection_.offer(discover_nics(), Carrier::tcp);
  } catch (const HolmesError& error) {
    offer.failure = error.kind();
    offer.failure_text = error.what();
    offer.failure_context = error.context();
  }
  offer.host = host_name();
  offer.place = host_identity();
  offer.cluster = cluster_;
  return offer;
}

Pair Network::meet(const std::shared_ptr<Store>& store, int rank, const Handle& handle) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = 2;
  options.name = "nccl-net/" + to_hex({handle.token.data(), 4}) + "/" + std::to_string(handle.listener);
  options.secret = secret_for(handle);
  options.transport = transport_;
  options.timeout = no_deadline;
  options.connect_timeout = connect_timeout_;
  options.labels = await_peer(*store, options.name, rank, handle);
  // Not the key of make_communicator, which chooses too where none is needed here.
  const Meeting meeting{
      *store, options.name + "/pair/nics", "choosing the NICs", rank, options.size, connect_timeout_, options.secret};
  const NicAgreement agreement = agree_nics(meeting, make_offer(), Carrier::tcp);
  for (const auto& [nic, address] : agreement.sockets) options.nics.push_back({nic, address});
  if (!cluster_.empty()) options.clusters = {0, agreement.clusters[0] == agreement.clusters[1] ? 0 : 1};
  log_nics(options, agreement.reason);
  Pair pair;
  if (!options.labels.empty()) pair.peer_rank = options.labels[static_cast<std::size_t>(1 - rank)];
  pair.communicator = std::dynamic_pointer_cast<HostCommunicator>(make_communicator(store, std::move(options)));
  if (is_polled_) pair.communicator->set_polled();
  return pair;
}

}  // namespace holmes::nccl_net
