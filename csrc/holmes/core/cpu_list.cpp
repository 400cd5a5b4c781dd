#include "holmes/core/cpu_list.hpp"

#include <sched.h>
#include <unistd.h>

#include <charconv>
#include <set>
#include <sstream>

namespace holmes {
namespace {

std::optional<int> cpu_from(const std::string& text) {
  int cpu = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), cpu);
  const bool is_good = error == std::errc{} && end == text.data() + text.size() && cpu >= 0 && cpu < CPU_SETSIZE;
  return is_good ? std::optional(cpu) : std::nullopt;
}

}  // namespace

std::optional<std::vector<int>> cpu_list_from(const std::string& text) {
  std::set<int> cpus;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    const auto dash = range.find('-');
    const auto first = cpu_from(range.substr(0, dash));
    const auto last = dash == std::string::npos ? first : cpu_from(range.substr(dash + 1));
    if (!first || !last || *first > *last) return std::nullopt;
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.insert(cpu);
  }
  if (cpus.empty() || text.back() == ',') return std::nullopt;
  return std::vector<int>(cpus.begin(), cpus.end());
}

std::string cpu_list_text(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(cpus[i]);
    if (last > i) text.append("-").append(std::to_string(cpus[last]));
    i = last + 1;
  }
  return text;
}

int online_processors() {
  static const int online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  return online;
}

}  // namespace holmes
