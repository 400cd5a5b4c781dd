#include "holmes/bootstrap/nic_agreement.hpp"

#include <algorithm>
#include <bit>

#include "holmes/core/env.hpp"
#include "holmes/core/fields.hpp"
#include "holmes/core/log.hpp"
#include "holmes/discover/host.hpp"

namespace holmes {
namespace {

constexpr std::uint64_t max_count = 1 << 20;  // of candidates, names or ranks; a larger one is garbage

void add(FieldWriter& writer, const NicCandidate& one) {
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

NicCandidate read_candidate(FieldReader& reader) {
  NicCandidate one;
  one.nic = reader.text();
  one.port = reader.text();
  one.nic_class = static_cast<NicClass>(reader.number(static_cast<std::uint64_t>(NicClass::loopback)));
  one.kind = static_cast<NicKind>(reader.number(static_cast<std::uint64_t>(NicKind::loopback)));
  one.link_layer = reader.text();
  one.wire = reader.text();
  one.speed_gbps = std::bit_cast<double>(reader.number());
  one.address.address = reader.text();
  one.address.prefix_length = static_cast<int>(reader.number(128));
  for (bool* flag : {&one.has_gateway, &one.is_rdma, &one.is_gid, &one.is_selected}) *flag = reader.number(1) == 1;
  return one;
}

std::string encode(const NicOffer& offer) {
  FieldWriter writer;
  for (const std::string* text : {&offer.host, &offer.place, &offer.cluster, &offer.inventory}) writer.add(*text);
  writer.add(std::uint64_t{offer.restricts});
  writer.add(std::uint64_t{offer.wants_rdma});
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

NicOffer decode_offer(const std::string& bytes, const std::string& writer) {
  FieldReader reader(bytes, writer);
  NicOffer offer;
  for (std::string* text : {&offer.host, &offer.place, &offer.cluster, &offer.inventory}) *text = reader.text();
  offer.restricts = reader.number(1) == 1;
  offer.wants_rdma = reader.number(1) == 1;
  offer.max_rails = reader.optional_number();
  offer.streams = static_cast<int>(reader.number(max_count));
  if (const auto kind = reader.optional_number()) offer.failure = static_cast<ErrorKind>(*kind);
  offer.failure_text = reader.text();
  offer.failure_context.nic = reader.text();
  offer.failure_context.system_errno = reader.optional_number();
  const bool has_loopback = reader.number(1) == 1;
  NicAddress loopback{reader.text(), reader.text()};
  if (has_loopback) offer.loopback = std::move(loopback);
  for (auto left = reader.number(max_count); left > 0; --left) offer.candidates.push_back(read_candidate(reader));
  return offer;
}

// Rank 0's answer: for every rank its rails and ports.
std::string conclude(const std::vector<std::string>& values, Carrier carrier) {
  std::vector<NicOffer> offers;
  for (std::size_t rank = 0; rank < values.size(); ++rank)
    offers.push_back(decode_offer(values[rank], "rank " + std::to_string(rank)));
  const NicChoice choice = choose_nics(offers, carrier);
  FieldWriter writer;
  writer.add(choice.reason);
  writer.add(static_cast<std::uint64_t>(std::ranges::min(offers, {}, &NicOffer::streams).streams));
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    writer.add(offers[rank].cluster);
    writer.add(std::uint64_t{choice.sockets[rank].size()});
    for (const auto& [nic, address] : choice.sockets[rank]) writer.add(nic), writer.add(address);
    const auto ports = choice.ports.empty() ? std::vector<std::string>{} : choice.ports[rank];
    writer.add(std::uint64_t{ports.size()});
    for (const std::string& port : ports) writer.add(port);
  }
  return writer.take();
}

}  // namespace

NicAgreement agree_nics(const Meeting& meeting, const NicOffer& offer, Carrier carrier) {
  const std::string answer =
      meet(meeting, encode(offer), [&](const std::vector<std::string>& values) { return conclude(values, carrier); });
  const std::string writer = "rank 0";
  FieldReader reader(answer, writer);
  NicAgreement agreement;
  agreement.reason = reader.text();
  const auto streams = reader.number(max_count);
  for (int rank = 0; rank < meeting.size; ++rank) {
    agreement.clusters.push_back(reader.text());
    std::vector<NicAddress> rails;
    for (auto left = reader.number(max_count); left > 0; --left) {
      std::string nic = reader.text();
      rails.push_back({std::move(nic), reader.text()});
    }
    std::vector<std::string> ports;
    for (auto left = reader.number(max_count); left > 0; --left) ports.push_back(reader.text());
    if (rank != meeting.rank) continue;
    agreement.ports = std::move(ports);
    for (std::uint64_t stream = 0; stream < streams; ++stream)
      agreement.sockets.insert(agreement.sockets.end(), rails.begin(), rails.end());
  }
  return agreement;
}

std::vector<NicBinding> default_nics(Store& store, const CommunicatorOptions& options) {
  const Meeting meeting{store,        options.name + "/nics", "choosing the NICs",
                        options.rank, options.size,           options.connect_timeout};
  NicOffer offer = offer_all(discover_nics(), Carrier::tcp);
  offer.host = host_name();
  offer.place = host_identity();
  const NicAgreement agreement = agree_nics(meeting, offer, Carrier::tcp);
  log(LogLevel::info, options.rank, "communicator " + options.name + ": " + agreement.reason);
  std::vector<NicBinding> nics;
  for (const auto& [nic, address] : agreement.sockets) nics.push_back({nic, address});
  return nics;
}

}  // namespace holmes
