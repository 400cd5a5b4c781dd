#include "holmes/bootstrap/secret.hpp"

#include <sys/random.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "holmes/core/error.hpp"

namespace holmes {

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  std::size_t filled = 0;
  while (filled < count) {
    const ssize_t got = ::getrandom(bytes.data() + filled, count - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw SystemError("the kernel gives no random bytes: " + errno_text(errno), {.system_errno = errno});
    filled += static_cast<std::size_t>(got);
  }
  return bytes;
}

std::string to_hex(const std::string& bytes) {
  constexpr const char* digits = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

namespace {

constexpr std::size_t least_secret_bytes = 16;
// What is random has more: of 16 hexadecimal digits one in a million has fewer.
constexpr std::size_t least_different_bytes = 5;

constexpr std::size_t most_secret_bytes = 64 * 1024;

// Without the last line's end; empty where it cannot be had. Nothing but a regular file: a FIFO nobody writes into, or
// a device, would be read for ever.
std::string content_of(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) > most_secret_bytes)
    return "";
  std::ifstream file(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(file), {}};
  if (content.ends_with('\n')) content.pop_back();
  return file.is_open() && !file.bad() ? content : "";
}

// Refuses what can be found by trying. `source`: who gave it.
std::string judged(const std::string& secret, const std::string& source) {
  const std::size_t different = std::set<char>(secret.begin(), secret.end()).size();
  if (secret.size() >= least_secret_bytes && different >= least_different_bytes) return secret;
  throw UsageError("the job's secret in " + source + " has " + std::to_string(secret.size()) + " bytes, " +
                   std::to_string(different) + " of them different; it must have at least " +
                   std::to_string(least_secret_bytes) + ", " + std::to_string(least_different_bytes) +
                   " of them different, as who reads the store or a handshake can try for it; use 32 random bytes, "
                   "for example of 'openssl rand -hex 32'");
}

}  // namespace

std::optional<std::string> given_secret(const std::string& option, const Env& env) {
  if (!option.empty()) return judged(option, "the option 'secret'");
  if (env.secret) return judged(*env.secret, "HOLMES_SECRET");
  if (!env.secret_file) return std::nullopt;
  const std::string secret = content_of(*env.secret_file);
  if (secret.empty()) {
    throw UsageError("HOLMES_SECRET_FILE='" + *env.secret_file +
                     "' cannot be used: it must be a readable regular file of 1 to " +
                     std::to_string(most_secret_bytes) + " bytes; write the secret into one or unset the variable");
  }
  return judged(secret, "HOLMES_SECRET_FILE='" + *env.secret_file + "'");
}

}  // namespace holmes
