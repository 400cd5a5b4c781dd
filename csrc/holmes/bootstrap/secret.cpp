#include "holmes/bootstrap/secret.hpp"

#include <sys/random.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>

#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"

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

std::string judged(const std::string& secret) {
  static std::once_flag warned;
  if (secret.size() < least_secret_bytes) {
    std::call_once(warned, [&] {
      log(LogLevel::warn, std::nullopt,
          "the job's secret has " + std::to_string(secret.size()) +
              " bytes: who reads the store or a handshake can find it by trying; use 32 random ones, for example of "
              "'openssl rand -hex 32'");
    });
  }
  return secret;
}

}  // namespace

std::optional<std::string> given_secret(const std::string& option, const Env& env) {
  if (!option.empty()) return judged(option);
  if (env.secret) return judged(*env.secret);
  if (!env.secret_file) return std::nullopt;
  const std::string secret = content_of(*env.secret_file);
  if (secret.empty()) {
    throw UsageError("HOLMES_SECRET_FILE='" + *env.secret_file +
                     "' cannot be used: it must be a readable regular file of 1 to " +
                     std::to_string(most_secret_bytes) + " bytes; write the secret into one or unset the variable");
  }
  return judged(secret);
}

}  // namespace holmes
