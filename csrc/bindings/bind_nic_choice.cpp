// The choice of NICs for Python: what a rank brings, the agreement, and the order of networks for plans.
#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/python_values.hpp"
#include "holmes/bootstrap/nic_agreement.hpp"
#include "holmes/bootstrap/rdma_setup.hpp"
#include "holmes/discover/nic_selection.hpp"
#include "holmes/discover/preference.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

Carrier carrier_from_name(const std::string& name) {
  if (name == "tcp") return Carrier::tcp;
  if (name == "nccl") return Carrier::nccl;
  if (name == "rdma") return Carrier::rdma;
  if (name == "auto") return Carrier::automatic;
  throw UsageError("carrier '" + name + "' does not exist; use 'tcp', 'nccl', 'rdma' or 'auto'");
}

NicClass class_from_name(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(NicClass::loopback); ++i)
    if (const auto one = static_cast<NicClass>(i); name == to_string(one)) return one;
  throw UsageError("NIC class '" + name + "' does not exist");
}

void fail(NicOffer& offer, const std::string& message, const std::string& nic, std::optional<int> system_errno) {
  offer.failure = system_errno ? ErrorKind::system : ErrorKind::nic;
  offer.failure_text = message;
  offer.failure_context = {.nic = nic, .system_errno = system_errno};
}

py::tuple agree(const py::object& store, int rank, int size, const NicOffer& offer, const std::string& key,
                double timeout_s, const std::string& carrier, const std::string& secret) {
  const auto native = to_store(store);
  const Carrier what = carrier_from_name(carrier);
  const Meeting meeting{*native, key, "choosing the NICs", rank, size, to_duration("timeout_s", timeout_s), secret};
  NicAgreement agreement;
  {
    const GilRelease no_gil;
    agreement = agree_nics(meeting, offer, what);
  }
  std::vector<std::pair<std::string, std::string>> sockets;
  for (auto& [nic, address] : agreement.sockets) sockets.emplace_back(std::move(nic), std::move(address));
  return py::make_tuple(std::move(sockets), std::move(agreement.ports), agreement.reason,
                        std::move(agreement.clusters));
}

}  // namespace
}  // namespace holmes

void bind_nic_choice(py::module_& module) {
  using namespace holmes;
  module.def(
      "rdma_objection", [](const CommunicatorOptions& options) { return rdma_objection(options, Env::read()); },
      "options"_a, "Why a rank with transport 'auto' takes no RDMA, whatever ports it has; empty: nothing. Local.");
  module.def("log_nics", &log_nics, "options"_a, "reason"_a,
             "With HOLMES_LOG=info, a line: which rank of the group this is, its NICs, and why. Local.");
  py::class_<NicOffer>(module, "NicOffer", "What one rank brings to the choice of a group's NICs.")
      .def(py::init([](std::string host, std::string place) {
             NicOffer offer;
             offer.host = std::move(host);
             offer.place = std::move(place);
             return offer;
           }),
           "host"_a, "place"_a)
      .def_readwrite("cluster", &NicOffer::cluster, "That the rank names; all or none do.")
      .def_readwrite("max_rails", &NicOffer::max_rails, "None: no wish. The smallest number of all ranks counts.")
      .def_readwrite("no_rdma", &NicOffer::no_rdma, "Why it takes no RDMA, whatever ports it has; empty: nothing.")
      .def("fail", &fail, "message"_a, "nic"_a = "", "system_errno"_a = py::none(),
           "Brings an error in place of NICs: all ranks raise it, a SystemError with `system_errno`, else a NicError.");
  py::class_<NicSelection>(module, "NicSelection", "holmes_comm.NicSelection, but for its transport.")
      .def(py::init([](std::vector<std::string> names, std::string nic_class, bool fastest, std::string subnet,
                       std::optional<int> max_rails, int streams) {
             NicSelection selection{.names = std::move(names),
                                    .nic_class = std::move(nic_class),
                                    .subnet = std::move(subnet),
                                    .max_rails = max_rails,
                                    .streams = streams,
                                    .fastest = fastest};
             selection.check();
             return selection;
           }),
           "names"_a, "nic_class"_a, "fastest"_a, "subnet"_a, "max_rails"_a, "streams"_a,
           "Raises UsageError on a value that a field cannot have.")
      .def_static("parse", &NicSelection::parse, "text"_a, "As HOLMES_NICS says it. Raises UsageError. Local.")
      .def_readonly("names", &NicSelection::names)
      .def_readonly("nic_class", &NicSelection::nic_class, "Empty: any.")
      .def_readonly("fastest", &NicSelection::fastest)
      .def_readonly("subnet", &NicSelection::subnet, "Empty: any.")
      .def_readonly("max_rails", &NicSelection::max_rails)
      .def_readonly("streams", &NicSelection::streams)
      .def_property_readonly("restricts", &NicSelection::restricts)
      .def("matching", &NicSelection::matching, "nics"_a, "As holmes_comm.NicSelection.matching.")
      .def("resolve", &NicSelection::resolve, "nics"_a, "As holmes_comm.NicSelection.resolve.")
      .def(
          "offer",
          [](const NicSelection& selection, const std::vector<Nic>& nics, const std::string& carrier, std::string host,
             std::string place) {
            NicOffer offer = selection.offer(nics, carrier_from_name(carrier));
            offer.host = std::move(host);
            offer.place = std::move(place);
            return offer;
          },
          "nics"_a, "carrier"_a, "host"_a, "place"_a,
          "What a host with these NICs brings to the choice for a carrier, 'tcp', 'nccl', 'rdma' or 'auto'. Raises "
          "NicError. Local.");
  module.def(
      "agree_nics", &agree, "store"_a, "rank"_a, "size"_a, "offer"_a, "key"_a, "timeout_s"_a, "carrier"_a,
      "secret"_a = "",
      "Chooses NICs together with the other ranks. Collective. This rank's (NIC, address) pairs, its HCA ports "
      "over RDMA, the reason and every rank's cluster. `carrier`: 'tcp', 'nccl', 'rdma' or 'auto'; `secret`: the "
      "job's, empty: HOLMES_SECRET or HOLMES_SECRET_FILE.");
  py::class_<SharedNetwork>(module, "SharedNetwork", "A network that hosts share, as far as its place depends on it.")
      .def(py::init([](const std::string& nic_class, bool is_routed, bool is_plain, std::optional<double> rate_gbps,
                       std::int64_t hosts, std::size_t size, std::vector<std::int64_t> wires) {
             return SharedNetwork{.nic_class = class_from_name(nic_class),
                                  .is_routed = is_routed,
                                  .is_plain = is_plain,
                                  .rate_gbps = rate_gbps,
                                  .hosts = hosts,
                                  .size = size,
                                  .wires = std::move(wires)};
           }),
           "nic_class"_a, "is_routed"_a, "is_plain"_a, "rate_gbps"_a, "hosts"_a, "size"_a, "wires"_a,
           "`hosts`: a number for the set of hosts, equal for rails; `size`: how many; `wires`: their NICs' numbers.");
  module.def("best_first", &best_first, "networks"_a,
             "The networks as indices, best first, each with its rails, itself the first (docs/nics.md).");
  module.def("are_alike", &are_alike, "one"_a, "other"_a,
             "Whether both are of one class and about one rate, so that one operation may be striped over them.");
}
