// Sysfs: reads files and links below an injectable root, so that every machine can be a test fixture.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace holmes {

// Paths are relative to the root. Missing or unreadable files are absent values, never errors: drivers refuse reads
// of attributes that do not apply. Immutable after construction, so safe to use from any thread.
class Sysfs {
public:
  // Throws UsageError where `root` is no folder.
  explicit Sysfs(std::filesystem::path root);

  const std::filesystem::path& root() const { return root_; }
  // The root describes a whole machine, addresses included: the running kernel is not asked.
  bool is_recorded() const { return recorded_; }

  std::vector<std::string> list(const std::string& folder) const;  // names in order; empty where there is no folder
  bool exists(const std::string& path) const;
  bool is_folder(const std::string& path) const;
  std::optional<std::string> read(const std::string& file) const;   // without white space at both ends
  std::optional<long> read_integer(const std::string& file) const;  // decimal, or hexadecimal with 0x
  // The file or folder that `path` leads to, all links followed, relative to the root.
  std::optional<std::string> resolve(const std::string& path) const;
  // Last component of `resolve(path)`.
  std::optional<std::string> resolve_name(const std::string& path) const;
  // A file of /proc: the root's own proc/`file`, else (unless the root is a recorded machine) the running kernel's.
  std::optional<std::string> read_proc(const std::string& file) const;

private:
  std::filesystem::path root_;  // canonical
  bool recorded_ = false;
};

std::string last_component(const std::string& path);

}  // namespace holmes
