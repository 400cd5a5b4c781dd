#include "holmes/nccl/agreement.hpp"

#include <algorithm>
#include <functional>
#include <limits>

#include "holmes/core/error.hpp"
#include "holmes/core/fields.hpp"
#include "holmes/core/text.hpp"
#include "holmes/nccl/abi.hpp"

namespace holmes::nccl {
namespace {

constexpr std::int64_t max_report_bytes = 64 * 1024;

[[noreturn]] void refuse_report() {
  throw ProtocolError("a rank's report on its NCCL makes no sense; run one version of Holmes");
}

std::string encode(const RankReport& report) {
  FieldWriter writer;
  writer.add(report.host);
  writer.add(static_cast<std::uint64_t>(report.version));
  writer.add(report.net);
  writer.add(report.link_layer);
  writer.add(report.error);
  writer.add(static_cast<std::uint64_t>(report.error_kind));
  writer.add(report.error_nic);
  return writer.take();
}

}  // namespace

RankReport decode_report(const std::string& text) {
  static const std::string writer = "a rank about its NCCL";
  constexpr std::uint64_t max_number = std::numeric_limits<int>::max();
  FieldReader reader(text, writer);
  RankReport report;
  report.host = reader.text();
  report.version = static_cast<int>(reader.number(max_number));
  report.net = reader.text();
  report.link_layer = reader.text();
  report.error = reader.text();
  report.error_kind = static_cast<int>(reader.number(max_number));
  report.error_nic = reader.text();
  return report;
}

namespace {

// "2.21.5: rank 0 (host a), rank 1 (host b); 2.30.7: rank 2 (host c)"
std::string who_has_what(const std::vector<RankReport>& reports,
                         const std::function<std::string(const RankReport&)>& property) {
  std::vector<std::pair<std::string, std::string>> groups;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const std::string value = property(reports[rank]);
    const std::string who = "rank " + std::to_string(rank) + " (host " + reports[rank].host + ")";
    bool is_known = false;
    for (auto& [known, members] : groups)
      if (known == value) members += ", " + who, is_known = true;
    if (!is_known) groups.emplace_back(value, who);
  }
  return joined(groups, "; ", [](const auto& group) { return group.first + ": " + group.second; });
}

}  // namespace

std::vector<RankReport> exchange_reports(Communicator& control, const RankReport& own, Duration timeout) {
  const auto size = static_cast<std::size_t>(control.size());
  CallOptions call;
  call.timeout = timeout;
  RankReport sent = own;
  if (sent.error.size() > max_report_bytes / 2) sent.error.resize(max_report_bytes / 2);
  std::string text = encode(sent);
  std::int64_t own_bytes = static_cast<std::int64_t>(text.size());
  std::vector<std::int64_t> bytes(size);
  std::vector<Buffer> outputs;
  for (auto& one : bytes) outputs.push_back({&one, 1, DType::int64});
  control.all_gather(std::move(outputs), {&own_bytes, 1, DType::int64}, call)->wait();
  std::vector<std::string> texts(size);
  outputs.clear();
  for (std::size_t rank = 0; rank < size; ++rank) {
    if (bytes[rank] < 0 || bytes[rank] > max_report_bytes) refuse_report();
    texts[rank].resize(static_cast<std::size_t>(bytes[rank]));
    outputs.push_back({texts[rank].data(), texts[rank].size(), DType::uint8});
  }
  control.all_gather(std::move(outputs), {text.data(), text.size(), DType::uint8}, call)->wait();
  std::vector<RankReport> reports;
  for (const std::string& one : texts) reports.push_back(decode_report(one));
  return reports;
}

void check_agreement(const std::vector<RankReport>& reports) {
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const RankReport& report = reports[rank];
    if (!report.error.empty())
      throw_error(static_cast<ErrorKind>(report.error_kind),
                  "rank " + std::to_string(rank) + " on host " + report.host + ": " + report.error,
                  {.peer = static_cast<int>(rank), .host = report.host, .nic = report.error_nic});
  }
  const auto differ = [&](const auto& property) {
    for (const RankReport& report : reports)
      if (property(report) != property(reports.front())) return true;
    return false;
  };
  const auto version = [](const RankReport& report) { return "NCCL " + version_text(report.version); };
  if (differ(version))
    throw UsageError("the ranks run different versions of NCCL, which cannot talk to each other: " +
                     who_has_what(reports, version) + "; install one version on all hosts");
  const auto net = [](const RankReport& report) -> std::string {
    if (report.net == "IB") return report.link_layer + " HCAs";
    return report.net == "Site" ? "the site's transport" : report.net == "holmes" ? "Holmes as plugin" : "sockets";
  };
  if (differ(net) && std::ranges::all_of(reports, [](const RankReport& report) {
        return report.net == "holmes" || report.net == "Socket";
      }))
    throw UsageError("the ranks do not agree on what carries NCCL's traffic: " + who_has_what(reports, net) +
                     "; give all of them the same NcclSettings(net=...) or HOLMES_NCCL_NET");
  if (differ(net))
    throw NicError("the ranks' NICs cannot talk to each other: " + who_has_what(reports, net) +
                   "; choose NICs of one class, for example with NicSelection(nic_class=...)");
}

}  // namespace holmes::nccl
