#include "holmes/tls/tls_stream.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

using namespace tls;

// Plain bytes encrypted ahead of one system call: several records, still in the L2 cache.
constexpr std::size_t batch_bytes = 128 * 1024;
// What `post` keeps where the socket is full.
constexpr std::size_t max_backlog_bytes = 64 * 1024;
// Records read with one system call.
constexpr std::size_t read_buffer_bytes = 128 * 1024;

constexpr const char* psk_identity = "holmes";
constexpr int key_index = 0;  // SSL_set_app_data

// Macros of OpenSSL's headers.
constexpr int ctrl_mode = 33, ctrl_set_read_ahead = 41, ctrl_set_min_proto_version = 123;
constexpr int bio_ctrl_flush = 11, bio_noclose = 0, bio_type_source_sink = 0x0400;
constexpr long mode_accept_moving_write_buffer = 2, mode_release_buffers = 16;
// A peer that is killed sends no closing alert; the lengths of messages tell whether anything is missing.
constexpr unsigned long op_ignore_unexpected_eof = 1UL << 7, op_no_renegotiation = 1UL << 30;

unsigned copy_key(const OpenSsl& library, const Ssl* ssl, unsigned char* key, unsigned max_key_bytes) {
  const auto* known = static_cast<const std::string*>(library.get_ex_data(ssl, key_index));
  if (known == nullptr || known->size() > max_key_bytes) return 0;
  std::memcpy(key, known->data(), known->size());
  return static_cast<unsigned>(known->size());
}

unsigned client_key(Ssl* ssl, const char*, char* identity, unsigned max_identity_bytes, unsigned char* key,
                    unsigned max_key_bytes) {
  if (std::strlen(psk_identity) + 1 > max_identity_bytes) return 0;
  std::strcpy(identity, psk_identity);
  return copy_key(openssl(), ssl, key, max_key_bytes);
}

unsigned server_key(Ssl* ssl, const char* identity, unsigned char* key, unsigned max_key_bytes) {
  if (identity == nullptr || std::strcmp(identity, psk_identity) != 0) return 0;
  return copy_key(openssl(), ssl, key, max_key_bytes);
}

Context* make_context(const OpenSsl& library) {
  Context* context = library.ctx_new(library.tls_method());
  // The hash of these is SHA-256, as that of a key given by a callback.
  const bool is_set = context != nullptr &&
                      library.ctx_ctrl(context, ctrl_set_min_proto_version, version_1_3, nullptr) == 1 &&
                      library.ctx_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") == 1;
  if (!is_set) throw UsageError("this OpenSSL has no TLS 1.3; use 1.1.1 or later (HOLMES_SSL_LIBRARY names one)");
  library.ctx_ctrl(context, ctrl_mode, mode_accept_moving_write_buffer | mode_release_buffers, nullptr);
  library.ctx_ctrl(context, ctrl_set_read_ahead, 1, nullptr);
  library.ctx_set_default_read_buffer_len(context, read_buffer_bytes);
  library.ctx_set_options(context, op_ignore_unexpected_eof | op_no_renegotiation);
  library.ctx_set_num_tickets(context, 0);
  library.ctx_set_psk_client_callback(context, client_key);
  library.ctx_set_psk_server_callback(context, server_key);
  return context;
}

Context* context_of(const OpenSsl& library) {
  static Context* const made = make_context(library);  // never destroyed: see openssl()
  return made;
}

// Where OpenSSL writes: memory, which takes everything. (A socket could raise SIGPIPE, and ask for the same call
// again.)
BioMethod* make_outgoing_method(const OpenSsl& library) {
  BioMethod* method = library.bio_meth_new(bio_type_source_sink, "holmes");
  if (method == nullptr) return nullptr;
  library.bio_meth_set_write(method, [](Bio* bio, const char* bytes, int count) {
    auto* to = static_cast<std::vector<char>*>(openssl().bio_get_data(bio));
    to->insert(to->end(), bytes, bytes + count);
    return count;
  });
  library.bio_meth_set_ctrl(method,
                            [](Bio*, int command, long, void*) -> long { return command == bio_ctrl_flush ? 1 : 0; });
  return method;
}

Bio* make_outgoing(const OpenSsl& library, std::vector<char>& to) {
  static BioMethod* const method = make_outgoing_method(library);
  Bio* bio = method == nullptr ? nullptr : library.bio_new(method);
  if (bio == nullptr) return nullptr;
  library.bio_set_data(bio, &to);
  library.bio_set_init(bio, 1);
  return bio;
}

}  // namespace

void TlsStream::Free::operator()(Ssl* ssl) const { openssl().ssl_free(ssl); }

TlsStream::TlsStream(int fd, bool is_client, std::string key, std::uint64_t rekey_bytes)
    : library_(openssl()), fd_(fd), key_(std::move(key)), rekey_bytes_(rekey_bytes) {
  if (key_.size() != key_bytes)
    throw UsageError("a TLS key has " + std::to_string(key_bytes) + " bytes, not " + std::to_string(key_.size()));
  library_.err_clear_error();
  ssl_.reset(library_.ssl_new(context_of(library_)));
  Bio* const outgoing = make_outgoing(library_, outgoing_);
  Bio* const incoming = library_.bio_new_socket(fd, bio_noclose);
  if (!ssl_ || outgoing == nullptr || incoming == nullptr || library_.set_ex_data(ssl_.get(), key_index, &key_) != 1)
    throw SystemError("OpenSSL cannot make a TLS connection: " + error_text());
  library_.set0_rbio(ssl_.get(), incoming);
  library_.set0_wbio(ssl_.get(), outgoing);
  // No certificate is trusted: the key or nothing.
  if (is_client) library_.set_verify(ssl_.get(), verify_peer, nullptr);
  is_client ? library_.set_connect_state(ssl_.get()) : library_.set_accept_state(ssl_.get());
}

TlsStream::~TlsStream() = default;

std::string TlsStream::error_text() const {
  const unsigned long error = library_.err_get_error();
  if (error == 0) return "no reason given";
  if (const char* reason = library_.err_reason_error_string(error)) return reason;
  std::array<char, 256> text{};
  library_.err_error_string_n(error, text.data(), text.size());
  return text.data();
}

bool TlsStream::flush() {
  while (has_backlog()) {
    const ssize_t sent =
        ::send(fd_, outgoing_.data() + flushed_bytes_, outgoing_.size() - flushed_bytes_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    flushed_bytes_ += static_cast<std::size_t>(sent);
  }
  outgoing_.clear();
  flushed_bytes_ = 0;
  return true;
}

TlsStream::Step TlsStream::handshake() {
  if (!failure_.empty()) return Step::failed;
  library_.err_clear_error();
  errno = 0;
  const int result = library_.do_handshake(ssl_.get());
  const int error = result == 1 ? 0 : library_.get_error(ssl_.get(), result);
  const int system_errno = errno;
  if (!flush() && errno != EAGAIN) {
    is_broken_ = true;
    failure_ = "the connection broke: " + errno_text(errno);
    return Step::failed;
  }
  if (result == 1) {
    if (has_backlog()) return Step::waiting;
    // Resumed means: by the key. Anything else would be a certificate.
    if (library_.session_reused(ssl_.get()) == 1) return Step::done;
    failure_ = "it proved no key";
    return Step::failed;
  }
  if (error == error_want_read || error == error_want_write) return Step::waiting;
  is_broken_ = error == error_zero_return || (error == error_system_call);
  failure_ = !is_broken_         ? error_text()
             : system_errno == 0 ? "it closed the connection"
                                 : "the connection broke: " + errno_text(system_errno);
  return Step::failed;
}

short TlsStream::events() const { return has_backlog() ? POLLOUT : POLLIN; }

std::string TlsStream::description() const {
  const std::lock_guard lock(mutex_);
  const char* cipher = library_.cipher_get_name(library_.get_current_cipher(ssl_.get()));
  return std::string(library_.get_version(ssl_.get())) + " " + (cipher ? cipher : "");
}

bool TlsStream::encrypt(const void* bytes, std::size_t count) {
  library_.err_clear_error();
  if (key_used_bytes_ >= rekey_bytes_) {
    constexpr int not_requested = 0;  // of the peer: it counts its own bytes
    if (library_.key_update(ssl_.get(), not_requested) != 1) return false;
    key_used_bytes_ = 0;
  }
  key_used_bytes_ += count;
  // Into memory, which takes everything.
  return library_.write(ssl_.get(), bytes, static_cast<int>(count)) == static_cast<int>(count);
}

ssize_t TlsStream::send(const msghdr& message) {
  const std::lock_guard lock(mutex_);
  std::size_t taken = 0;
  std::size_t piece = 0, offset = 0;  // of the first byte that is not encrypted
  const auto skip = [&](std::size_t bytes) {
    while (bytes > 0 && piece < message.msg_iovlen) {
      const std::size_t part = std::min(bytes, message.msg_iov[piece].iov_len - offset);
      bytes -= part;
      offset += part;
      if (offset == message.msg_iov[piece].iov_len) ++piece, offset = 0;
    }
  };
  skip(encrypted_bytes_);
  while (true) {
    if (!flush()) break;
    taken += std::exchange(encrypted_bytes_, 0);
    while (piece < message.msg_iovlen && encrypted_bytes_ < batch_bytes) {
      const iovec& from = message.msg_iov[piece];
      const std::size_t bytes = std::min(from.iov_len - offset, batch_bytes - encrypted_bytes_);
      if (bytes > 0 && !encrypt(static_cast<const char*>(from.iov_base) + offset, bytes)) {
        errno = EPROTO;
        return -1;
      }
      encrypted_bytes_ += bytes;
      offset += bytes;
      if (offset == from.iov_len) ++piece, offset = 0;
    }
    if (encrypted_bytes_ == 0) return static_cast<ssize_t>(taken);
  }
  return taken > 0 ? static_cast<ssize_t>(taken) : -1;
}

ssize_t TlsStream::post(const msghdr& message) {
  const std::lock_guard lock(mutex_);
  if (!flush() && (errno != EAGAIN || outgoing_.size() - flushed_bytes_ > max_backlog_bytes)) return -1;
  std::string whole;
  for (std::size_t i = 0; i < message.msg_iovlen; ++i)
    whole.append(static_cast<const char*>(message.msg_iov[i].iov_base), message.msg_iov[i].iov_len);
  if (!whole.empty() && !encrypt(whole.data(), whole.size())) {
    errno = EPROTO;
    return -1;
  }
  if (!flush() && errno != EAGAIN) return -1;
  return static_cast<ssize_t>(whole.size());
}

ssize_t TlsStream::recv(const msghdr& message) {
  const std::lock_guard lock(mutex_);
  if (encrypted_bytes_ == 0) flush();  // what `post` kept
  if (read_errno_ != 0) {
    errno = read_errno_;
    return -1;
  }
  std::size_t total = 0;
  for (std::size_t i = 0; i < message.msg_iovlen; ++i) {
    auto* to = static_cast<char*>(message.msg_iov[i].iov_base);
    std::size_t left = message.msg_iov[i].iov_len;
    while (left > 0) {
      library_.err_clear_error();
      errno = 0;
      const int got = library_.read(ssl_.get(), to, static_cast<int>(std::min<std::size_t>(left, INT_MAX)));
      if (got > 0) {
        to += got;
        left -= static_cast<std::size_t>(got);
        total += static_cast<std::size_t>(got);
        may_hold_input_ = true;
        continue;
      }
      const int error = library_.get_error(ssl_.get(), got);
      const int system_errno = errno;
      if (error == error_zero_return || (error == error_system_call && system_errno == 0))
        return static_cast<ssize_t>(total);  // the end: told again by the next call
      if (error == error_want_read || error == error_want_write) {
        may_hold_input_ = false;
        errno = EAGAIN;
      } else {
        read_errno_ = error == error_system_call ? system_errno : EPROTO;
        errno = read_errno_;
      }
      return total > 0 ? static_cast<ssize_t>(total) : -1;
    }
  }
  return static_cast<ssize_t>(total);
}

bool TlsStream::may_hold_input() const {
  const std::lock_guard lock(mutex_);
  return may_hold_input_;
}

}  // namespace holmes
