#include "holmes/bootstrap/rank_info.hpp"

#include <limits>

#include "holmes/bootstrap/handshake.hpp"
#include "holmes/core/fields.hpp"
#include "holmes/transport/rdma/rings.hpp"

namespace holmes {
namespace {

constexpr const char* record_magic = "holmes";

class Writer : public FieldWriter {
public:
  explicit Writer(const char* type) { add(record_magic), add(protocol_version), add(type); }
};

class Reader : public FieldReader {
public:
  // Checks magic and version.
  Reader(const std::string& bytes, const std::string& writer) : FieldReader(bytes, writer) {
    if (text() != record_magic) refuse();
    const auto version = number();
    if (version != protocol_version) {
      throw ProtocolError(writer + " speaks protocol version " + std::to_string(version) + ", this rank version " +
                          std::to_string(protocol_version) + "; install the same version of Holmes on every host");
    }
  }
};

Failure read_failure(Reader& reader) {
  const auto kind = static_cast<ErrorKind>(reader.number(std::numeric_limits<int>::max()));
  Failure failure{kind, reader.text(), {}};
  failure.context.rank = reader.optional_number();
  failure.context.peer = reader.optional_number();
  failure.context.host = reader.text();
  failure.context.nic = reader.text();
  failure.context.system_errno = reader.optional_number();
  return failure;
}

}  // namespace

std::string encode(const RankInfo& record, const Seal& seal) {
  Writer writer("rank");
  writer.add(std::uint64_t{record.has_secret});
  SealedWriter fields(seal);
  fields.add(record.host);
  fields.add(record.machine);
  fields.add(record.user);
  fields.add(record.unix_token);
  fields.add(record.shared_memory_bytes);
  fields.add(static_cast<std::uint64_t>(record.transport));
  fields.add(static_cast<std::uint64_t>(record.tls));
  fields.add(std::uint64_t{record.integrity});
  fields.add(static_cast<std::uint64_t>(record.integrity_digest_every));
  fields.add(record.priority);
  fields.add(record.turn);
  fields.add(record.dscp);
  fields.add(static_cast<std::uint64_t>(record.wide_min_ranks));
  fields.add(std::uint64_t{record.chose_nics});
  fields.add(record.made_secret);
  fields.add(record.cluster);
  fields.add(std::uint64_t{record.runs_flat});
  fields.add(std::uint64_t{record.cluster_rails});
  fields.add(std::uint64_t{record.rdma_ports.size()});
  for (const CarryingPort& port : record.rdma_ports) fields.add(port.name), fields.add(port.fabric);
  fields.add(record.no_rdma);
  fields.add(std::uint64_t{record.rails.size()});
  for (const auto& rail : record.rails) {
    fields.add(rail.interface);
    fields.add(rail.address);
    fields.add(std::uint64_t{rail.port});
    fields.add(std::uint64_t{rail.local_port});
  }
  writer.add(fields.take());
  return writer.take();
}

std::string encode(const Failure& failure) {
  Writer writer("failure");
  writer.add(static_cast<std::uint64_t>(failure.kind));
  writer.add(failure.message);
  writer.add(failure.context.rank);
  writer.add(failure.context.peer);
  writer.add(failure.context.host);
  writer.add(failure.context.nic);
  writer.add(failure.context.system_errno);
  return writer.take();
}

std::string encode_success() { return Writer("success").take(); }

RankInfo decode_rank(const std::string& bytes, const std::string& writer, const Seal& seal,
                     const std::string* written) {
  Reader reader(bytes, writer);
  const auto type = reader.text();
  if (type == "failure") read_failure(reader).raise();
  if (type != "rank") reader.refuse();
  constexpr std::uint64_t max_port = std::numeric_limits<std::uint16_t>::max();
  RankInfo record;
  record.has_secret = reader.number(1) == 1;
  const std::string content = reader.text();
  if (record.has_secret == seal.secret.empty()) {
    if (written != nullptr) {
      throw ProtocolError("what " + writer +
                          " wrote into the store was changed there: the field 'has_secret' is not as that rank wrote "
                          "it; use a store that only this job can write");
    }
    record.host = FieldReader(content, writer).text();
    return record;  // refused where the records are compared
  }
  std::string own_content;
  if (written != nullptr) {
    Reader own(*written, writer);
    own.text(), own.number();
    own_content = own.text();
  }
  SealedReader fields(content, writer, seal, written != nullptr ? &own_content : nullptr);
  record.host = fields.text("host");
  record.machine = fields.text("machine");
  record.user = fields.text("user");
  record.unix_token = fields.text("unix_token");
  record.shared_memory_bytes = fields.number("shared_memory_bytes");
  record.transport = static_cast<Transport>(fields.number("transport", static_cast<std::uint64_t>(Transport::rdma)));
  record.tls = static_cast<TlsMode>(fields.number("tls", static_cast<std::uint64_t>(TlsMode::all)));
  record.integrity = fields.flag("integrity");
  record.integrity_digest_every =
      static_cast<int>(fields.number("integrity_digest_every", std::numeric_limits<int>::max()));
  record.priority = fields.optional_number("priority");
  record.turn = fields.optional_number("turn");
  record.dscp = fields.optional_number("dscp");
  record.wide_min_ranks = static_cast<int>(fields.number("wide_min_ranks", std::numeric_limits<int>::max()));
  record.chose_nics = fields.flag("chose_nics");
  record.made_secret = fields.text("made_secret");
  record.cluster = fields.text("cluster");
  record.runs_flat = fields.flag("runs_flat");
  record.cluster_rails = fields.number("cluster_rails", max_rails);
  const auto port_count = fields.number("number of RDMA ports", max_lanes);
  for (std::uint64_t i = 0; i < port_count; ++i) {
    const std::string port_name = "RDMA port " + std::to_string(i) + " ";
    std::string name = fields.text(port_name + "name");
    record.rdma_ports.push_back({std::move(name), fields.text(port_name + "fabric")});
  }
  record.no_rdma = fields.text("no_rdma");
  const auto rail_count = fields.number("number of rails", 2 * max_rails);
  if (record.cluster_rails > rail_count) reader.refuse();
  for (std::uint64_t i = 0; i < rail_count; ++i) {
    const std::string rail_name = "rail " + std::to_string(i) + " ";
    RailAddress rail;
    rail.interface = fields.text(rail_name + "interface");
    rail.address = fields.text(rail_name + "address");
    rail.port = static_cast<std::uint16_t>(fields.number(rail_name + "port", max_port));
    rail.local_port = static_cast<std::uint16_t>(fields.number(rail_name + "local_port", max_port));
    record.rails.push_back(std::move(rail));
  }
  return record;
}

std::optional<Failure> decode_outcome(const std::string& bytes, const std::string& writer) {
  Reader reader(bytes, writer);
  const auto type = reader.text();
  if (type == "success") return std::nullopt;
  if (type != "failure") reader.refuse();
  return read_failure(reader);
}

std::string seconds_text(Duration duration) {
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  std::string text = std::to_string(milliseconds / 1000);
  if (milliseconds % 1000 != 0) text += "." + std::to_string(1000 + milliseconds % 1000).substr(1);
  return text + " s";
}

}  // namespace holmes
