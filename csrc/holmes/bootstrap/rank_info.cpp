#include "holmes/bootstrap/rank_info.hpp"

#include <limits>

#include "holmes/bootstrap/handshake.hpp"
#include "holmes/core/fields.hpp"

namespace holmes {
namespace {

constexpr const char* magic = "holmes";

class Writer : public FieldWriter {
public:
  explicit Writer(const char* type) { add(magic), add(protocol_version), add(type); }
};

class Reader : public FieldReader {
public:
  // Checks magic and version.
  Reader(const std::string& bytes, const std::string& writer) : FieldReader(bytes, writer) {
    if (text() != magic) refuse();
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

std::string encode(const RankInfo& record) {
  Writer writer("rank");
  writer.add(record.host);
  writer.add(record.machine);
  writer.add(record.user);
  writer.add(record.unix_token);
  writer.add(record.shared_memory_bytes);
  writer.add(static_cast<std::uint64_t>(record.transport));
  writer.add(static_cast<std::uint64_t>(record.tls));
  writer.add(std::uint64_t{record.chose_nics});
  writer.add(std::uint64_t{record.has_secret});
  writer.add(record.made_secret);
  writer.add(record.cluster);
  writer.add(std::uint64_t{record.runs_flat});
  writer.add(std::uint64_t{record.cluster_rails});
  writer.add(std::uint64_t{record.rails.size()});
  for (const auto& rail : record.rails) {
    writer.add(rail.interface);
    writer.add(rail.address);
    writer.add(std::uint64_t{rail.port});
    writer.add(std::uint64_t{rail.local_port});
  }
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

RankInfo decode_rank(const std::string& bytes, const std::string& writer) {
  Reader reader(bytes, writer);
  const auto type = reader.text();
  if (type == "failure") read_failure(reader).raise();
  if (type != "rank") reader.refuse();
  constexpr std::uint64_t max_port = std::numeric_limits<std::uint16_t>::max();
  RankInfo record;
  record.host = reader.text();
  record.machine = reader.text();
  record.user = reader.text();
  record.unix_token = reader.text();
  record.shared_memory_bytes = reader.number();
  record.transport = static_cast<Transport>(reader.number(static_cast<std::uint64_t>(Transport::shm)));
  record.tls = static_cast<TlsMode>(reader.number(static_cast<std::uint64_t>(TlsMode::all)));
  record.chose_nics = reader.number(1) == 1;
  record.has_secret = reader.number(1) == 1;
  record.made_secret = reader.text();
  record.cluster = reader.text();
  record.runs_flat = reader.number(1) == 1;
  record.cluster_rails = reader.number(max_rails);
  const auto rail_count = reader.number(2 * max_rails);
  if (record.cluster_rails > rail_count) reader.refuse();
  for (std::uint64_t i = 0; i < rail_count; ++i) {
    RailAddress rail;
    rail.interface = reader.text();
    rail.address = reader.text();
    rail.port = static_cast<std::uint16_t>(reader.number(max_port));
    rail.local_port = static_cast<std::uint16_t>(reader.number(max_port));
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
