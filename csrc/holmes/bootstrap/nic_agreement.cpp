#include "holmes/bootstrap/nic_agreement.hpp"

#include <algorithm>
#include <bit>

#include "holmes/bootstrap/rdma_setup.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/text.hpp"
#include "holmes/discover/host.hpp"
#include "holmes/discover/nic_selection.hpp"

namespace holmes {
namespace {

constexpr std::uint64_t max_count = 1 << 20;  // of candidates, names or ranks; a larger one is garbage

void add(SealedWriter& writer, const NicCandidate& one) {
  writer.add(one.nic);
  writer.add(one.port);
  writer.add(static_cast<std::uint64_t>(one.nic_class));
  writer.add(static_cast<std::uint64_t>(one.kind));
  writer.add(one.link_layer);
  writer.add(one.wire);
  writer.add(std::bit_cast<std::uint64_t>(one.speed_gbps));
  writer.add(one.address.address);
  writer.add(static_cast<std::uint64_t>(one.address.prefix_length));
  for (const bool flag : {one.has_gateway, one.is_rdma, one.is_gid, one.is_selected}) writer.add(std::uint64_t{flag});
}

NicCandidate read_candidate(SealedReader& reader, const std::string& name) {
  NicCandidate one;
  one.nic = reader.text(name + "nic");
  one.port = reader.text(name + "port");
  one.nic_class = static_cast<NicClass>(reader.number(name + "class", static_cast<std::uint64_t>(NicClass::loopback)));
  one.kind = static_cast<NicKind>(reader.number(name + "kind", static_cast<std::uint64_t>(NicKind::loopback)));
  one.link_layer = reader.text(name + "link_layer");
  one.wire = reader.text(name + "wire");
  one.speed_gbps = std::bit_cast<double>(reader.number(name + "speed"));
  one.address.address = reader.text(name + "address");
  one.address.prefix_length = static_cast<int>(reader.number(name + "prefix_length", 128));
  one.has_gateway = reader.flag(name + "has_gateway");
  one.is_rdma = reader.flag(name + "is_rdma");
  one.is_gid = reader.flag(name + "is_gid");
  one.is_selected = reader.flag(name + "is_selected");
  return one;
}

std::string encode(const NicOffer& offer, const Seal& seal) {
  SealedWriter writer(seal);
  for (const std::string* text : {&offer.host, &offer.place, &offer.cluster, &offer.inventory}) writer.add(*text);
  writer.add(std::uint64_t{offer.restricts});
  writer.add(std::uint64_t{offer.wants_rdma});
  writer.add(offer.no_rdma);
  writer.add(offer.max_rails);
  writer.add(static_cast<std::uint64_t>(offer.streams));
  writer.add(offer.failure ? std::optional(static_cast<int>(*offer.failure)) : std::nullopt);
  writer.add(offer.failure_text);
  writer.add(offer.failure_context.nic);
  writer.add(offer.failure_context.system_errno);
  writer.add(std::uint64_t{offer.loopback.has_value()});
  writer.add(offer.loopback ? offer.loopback->nic : "");
  writer.add(offer.loopback ? offer.loopback->address : "");
  writer.add(std::uint64_t{offer.candidates.size()});
  for (const NicCandidate& one : offer.candidates) add(writer, one);
  return writer.take();
}

NicOffer decode_offer(const Sealed& offered, const std::string& writer) {
  SealedReader reader(offered.bytes, writer, offered.seal);
  NicOffer offer;
  offer.host = reader.text("host");
  offer.place = reader.text("place");
  offer.cluster = reader.text("cluster");
  offer.inventory = reader.text("inventory");
  offer.restricts = reader.flag("restricts");
  offer.wants_rdma = reader.flag("wants_rdma");
  offer.no_rdma = reader.text("no_rdma");
  offer.max_rails = reader.optional_number("max_rails");
  offer.streams = static_cast<int>(reader.number("streams", max_count));
  if (const auto kind = reader.optional_number("failure")) offer.failure = static_cast<ErrorKind>(*kind);
  offer.failure_text = reader.text("failure_text");
  offer.failure_context.nic = reader.text("failure_nic");
  offer.failure_context.system_errno = reader.optional_number("failure_errno");
  const bool has_loopback = reader.flag("has_loopback");
  std::string loopback = reader.text("loopback nic");
  const NicAddress on_loopback{std::move(loopback), reader.text("loopback address")};
  if (has_loopback) offer.loopback = on_loopback;
  const auto count = reader.number("number of NICs", max_count);
  for (std::uint64_t i = 0; i < count; ++i)
    offer.candidates.push_back(read_candidate(reader, "NIC " + std::to_string(i) + " "));
  return offer;
}

// Clusters by rank: each name once for ranks that follow each other.
std::string encode_clusters(const std::vector<NicOffer>& offers) {
  FieldWriter writer;
  for (std::size_t first = 0, end = 0; first < offers.size(); first = end) {
    while (end < offers.size() && offers[end].cluster == offers[first].cluster) ++end;
    writer.add(std::uint64_t{end - first});
    writer.add(offers[first].cluster);
  }
  return writer.take();
}

std::vector<std::string> decode_clusters(const std::string& bytes, int size, const std::string& writer) {
  FieldReader reader(bytes, writer);
  std::vector<std::string> clusters;
  while (clusters.size() < static_cast<std::size_t>(size)) {
    const auto count = reader.number(static_cast<std::uint64_t>(size) - clusters.size());
    clusters.insert(clusters.end(), count, reader.text());
  }
  return clusters;
}

// Rank 0's answer: to all what all know, and to every rank its rails and ports.
Conclusion conclude(const std::vector<Sealed>& values, Carrier carrier, const Seal& seal) {
  std::vector<NicOffer> offers;
  for (std::size_t rank = 0; rank < values.size(); ++rank)
    offers.push_back(decode_offer(values[rank], "rank " + std::to_string(rank)));
  const NicChoice choice = choose_nics(offers, carrier);
  Conclusion conclusion;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    FieldWriter nics;
    nics.add(std::uint64_t{choice.sockets[rank].size()});
    for (const auto& [nic, address] : choice.sockets[rank]) nics.add(nic), nics.add(address);
    if (!choice.ports.empty())
      for (const std::string& port : choice.ports[rank]) nics.add(port);
    SealedWriter own(seal_for(seal, static_cast<int>(rank)));
    own.add(nics.take());
    conclusion.for_each.push_back(own.take());
  }
  SealedWriter writer(seal);
  writer.add(choice.reason);
  writer.add(static_cast<std::uint64_t>(std::ranges::min(offers, {}, &NicOffer::streams).streams));
  writer.add(encode_clusters(offers));
  conclusion.for_all = writer.take();
  return conclusion;
}

NicAgreement read_answer(const Answer& answer, const Meeting& meeting) {
  const std::string writer = "rank 0";
  SealedReader reader(answer.for_all.bytes, writer, answer.for_all.seal);
  NicAgreement agreement;
  agreement.reason = reader.text("reason");
  const auto streams = reader.number("streams", max_count);
  agreement.clusters = decode_clusters(reader.text("clusters"), meeting.size, writer);
  const std::string nics = SealedReader(answer.own.bytes, writer, answer.own.seal).text("NICs");
  FieldReader own(nics, writer);
  std::vector<NicAddress> rails;
  for (auto left = own.number(max_count); left > 0; --left) {
    std::string nic = own.text();
    rails.push_back({std::move(nic), own.text()});
  }
  while (!own.at_end()) agreement.ports.push_back(own.text());
  for (std::uint64_t stream = 0; stream < streams; ++stream)
    agreement.sockets.insert(agreement.sockets.end(), rails.begin(), rails.end());
  return agreement;
}

}  // namespace

NicAgreement agree_nics(const Meeting& asked, const NicOffer& offer, Carrier carrier) {
  Meeting meeting = asked;
  meeting.timeout = Env::read().connect_timeout.value_or(asked.timeout);
  const Answer answer = meet(
      meeting, [&](const Seal& seal) { return encode(offer, seal); },
      [&](const std::vector<Sealed>& values, const Seal& seal) { return conclude(values, carrier, seal); });
  NicAgreement agreement = read_answer(answer, meeting);
  const auto& own_cluster = agreement.clusters[static_cast<std::size_t>(meeting.rank)];
  if (own_cluster != offer.cluster) {
    throw ProtocolError("what rank 0 wrote into the store says that this rank is in cluster '" + own_cluster +
                            "', but it is in '" + offer.cluster + "'; use a store that only this job can write",
                        {.rank = meeting.rank, .peer = 0});
  }
  return agreement;
}

void log_nics(const CommunicatorOptions& options, const std::string& reason) {
  if (!log_enabled(LogLevel::info)) return;
  const auto listed = [](const std::vector<NicBinding>& nics) {
    const auto text = [](const NicBinding& nic) { return nic.interface + " " + nic.address; };
    return nics.empty() ? "no NIC" : joined(nics, ", ", text);
  };
  std::string text = "group '" + options.name + "': rank " + std::to_string(options.rank) + " of " +
                     std::to_string(options.size) + " on " + listed(options.nics);
  if (!options.cluster_nics.empty()) text += ", inside its cluster on " + listed(options.cluster_nics);
  for (const std::string& port : options.rdma_ports) text += ", RDMA over " + port;
  log(LogLevel::info, options.job_rank.value_or(options.rank), text + ": " + reason);
}

Carrier carrier_of(const CommunicatorOptions& options) {
  if (options.transport == Transport::automatic) return Carrier::automatic;
  return options.transport == Transport::rdma ? Carrier::rdma : Carrier::tcp;
}

void set_default_nics(Store& store, CommunicatorOptions& options) {
  const Meeting meeting{store,        options.name + "/nics",  "choosing the NICs", options.rank,
                        options.size, options.connect_timeout, options.secret};
  const Carrier carrier = carrier_of(options);
  NicOffer offer = NicSelection{}.offer(discover_nics(), carrier);
  offer.no_rdma = rdma_objection(options, Env::read());
  offer.host = host_name();
  offer.place = host_identity();
  const NicAgreement agreement = agree_nics(meeting, offer, carrier);
  for (const auto& [nic, address] : agreement.sockets) options.nics.push_back({nic, address});
  options.rdma_ports = agreement.ports;
  log_nics(options, agreement.reason);
}

}  // namespace holmes
