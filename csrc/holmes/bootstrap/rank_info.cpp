#include "holmes/bootstrap/rank_info.hpp"

#include <sys/stat.h>

#include <charconv>
#include <fstream>
#include <limits>

#include "holmes/bootstrap/handshake.hpp"

namespace holmes {
namespace {

constexpr const char* magic = "holmes";

// Fields as "length:bytes", one after the other.
class Writer {
public:
  explicit Writer(const char* type) { add(magic), add(protocol_version), add(type); }
  void add(const std::string& field) { bytes_ += std::to_string(field.size()) + ":" + field; }
  void add(std::uint64_t number) { add(std::to_string(number)); }
  void add(std::optional<int> number) { add(number ? std::to_string(*number) : ""); }
  std::string take() { return std::move(bytes_); }

private:
  std::string bytes_;
};

class Reader {
public:
  // Checks magic and version.
  Reader(const std::string& bytes, const std::string& writer) : bytes_(bytes), writer_(writer) {
    if (text() != magic) refuse();
    const auto version = number();
    if (version != protocol_version) {
      throw ProtocolError(writer + " speaks protocol version " + std::to_string(version) + ", this rank version " +
                          std::to_string(protocol_version) + "; install the same version of Holmes on every host");
    }
  }

  std::string text() {
    const auto colon = bytes_.find(':', offset_);
    if (colon == std::string::npos) refuse();
    const auto size = parse(bytes_.substr(offset_, colon - offset_));
    if (size > bytes_.size() - colon - 1) refuse();
    offset_ = colon + 1 + size;
    return bytes_.substr(colon + 1, size);
  }
  std::uint64_t number() { return parse(text()); }
  std::uint64_t number(std::uint64_t max) {
    const auto value = number();
    return value <= max ? value : refuse();
  }
  std::optional<int> optional_number() {
    const auto field = text();
    if (field.empty()) return std::nullopt;
    const auto value = parse(field);
    return value <= std::numeric_limits<int>::max() ? static_cast<int>(value) : static_cast<int>(refuse());
  }
  [[noreturn]] std::uint64_t refuse() const {
    throw ProtocolError("the store record of " + writer_ +
                        " makes no sense; does another program, or another job, use the same store?");
  }

private:
  std::uint64_t parse(const std::string& field) const {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    return error == std::errc{} && end == field.data() + field.size() ? value : refuse();
  }

  const std::string& bytes_;
  const std::string& writer_;
  std::size_t offset_ = 0;
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

std::string machine_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  struct stat network{};
  // Namespaces belong to threads.
  if (!std::getline(file, boot) || boot.empty() || ::stat("/proc/thread-self/ns/net", &network) != 0) return "";
  return boot + ":" + std::to_string(network.st_dev) + ":" + std::to_string(network.st_ino);
}

std::string seconds_text(Duration duration) {
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  std::string text = std::to_string(milliseconds / 1000);
  if (milliseconds % 1000 != 0) text += "." + std::to_string(1000 + milliseconds % 1000).substr(1);
  return text + " s";
}

}  // namespace holmes
