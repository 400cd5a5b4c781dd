// CPU lists: sets of processors, written as Linux does ("0-3,8").
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace holmes {

// Ascending, without repeats. Absent where `text` is no such list, or names a processor that a cpu_set_t cannot hold.
std::optional<std::vector<int>> cpu_list_from(const std::string& text);
std::string cpu_list_text(const std::vector<int>& cpus);

// Of this machine, whether or not this process may run on them.
int online_processors();

}  // namespace holmes
