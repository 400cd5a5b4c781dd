#include "holmes/discover/sysfs.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "holmes/core/error.hpp"

namespace holmes {
namespace fs = std::filesystem;

namespace {

std::optional<std::string> read_file(const fs::path& path) {
  std::ifstream stream(path);
  if (!stream) return std::nullopt;
  std::ostringstream text;
  text << stream.rdbuf();
  if (stream.bad()) return std::nullopt;
  const std::string content = text.str();
  const auto begin = content.find_first_not_of(" \t\n");
  if (begin == std::string::npos) return std::nullopt;
  return content.substr(begin, content.find_last_not_of(" \t\n") - begin + 1);
}

}  // namespace

Sysfs::Sysfs(fs::path root) {
  std::error_code error;
  root_ = fs::canonical(root, error);
  if (error || !fs::is_directory(root_, error))
    throw UsageError("sysfs root '" + root.string() + "' is not a folder: give one that holds class/net, or unset " +
                     "HOLMES_SYSFS_ROOT to read this machine's /sys");
  recorded_ = fs::is_regular_file(root_ / "addresses", error);
}

std::vector<std::string> Sysfs::list(const std::string& folder) const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(root_ / folder, error), end; !error && entry != end; entry.increment(error))
    names.push_back(entry->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

bool Sysfs::exists(const std::string& path) const {
  std::error_code error;
  return fs::exists(root_ / path, error);
}

bool Sysfs::is_folder(const std::string& path) const {
  std::error_code error;
  return fs::is_directory(root_ / path, error);
}

std::optional<std::string> Sysfs::read(const std::string& file) const { return read_file(root_ / file); }

std::optional<long> Sysfs::read_integer(const std::string& file) const {
  const auto text = read(file);
  if (!text) return std::nullopt;
  const bool hexadecimal = text->starts_with("0x");
  const char* end = text->data() + text->size();
  long value = 0;
  const auto [rest, error] = std::from_chars(text->data() + (hexadecimal ? 2 : 0), end, value, hexadecimal ? 16 : 10);
  return error == std::errc() && rest == end ? std::optional<long>(value) : std::nullopt;
}

std::optional<std::string> Sysfs::resolve(const std::string& path) const {
  std::error_code error;
  const fs::path target = fs::canonical(root_ / path, error);
  if (error) return std::nullopt;
  return target.lexically_relative(root_).string();
}

std::optional<std::string> Sysfs::resolve_name(const std::string& path) const {
  const auto target = resolve(path);
  return target ? std::optional<std::string>(last_component(*target)) : std::nullopt;
}

std::optional<std::string> Sysfs::read_proc(const std::string& file) const {
  if (auto own = read("proc/" + file); own || recorded_) return own;
  return read_file(fs::path("/proc") / file);
}

std::string last_component(const std::string& path) { return path.substr(path.rfind('/') + 1); }

}  // namespace holmes
