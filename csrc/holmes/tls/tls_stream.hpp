// TlsStream: TLS 1.3 over one connected, non-blocking socket. Both sides know a key; there are no certificates.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "holmes/tls/openssl.hpp"

namespace holmes {

// What travels is encrypted and authenticated; the key agreement is ephemeral (psk_dhe_ke), so that a key which becomes
// known later opens nothing. Thread-safe; borrows the descriptor.
class TlsStream {
public:
  static constexpr std::size_t key_bytes = 32;
  // A sender's traffic key is replaced after so many bytes: AES-GCM protects 2^24.5 records of 16 KiB (RFC 8446, 5.5).
  static constexpr std::uint64_t default_rekey_bytes = std::uint64_t{1} << 36;

  enum class Step { waiting, done, failed };

  // `key`: `key_bytes` bytes, the same on both sides and on no other connection. One side is the client. Throws
  // UsageError where there is no OpenSSL, SystemError where it cannot make a connection.
  TlsStream(int fd, bool is_client, std::string key, std::uint64_t rekey_bytes = default_rekey_bytes);
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;
  ~TlsStream();

  // --- set-up ---
  // Goes as far as the socket allows.
  Step handshake();
  short events() const;  // what to poll for while waiting
  const std::string& failure() const { return failure_; }
  // The peer's end broke, rather than its TLS.
  bool is_broken() const { return is_broken_; }
  // "TLSv1.3 TLS_AES_128_GCM_SHA256".
  std::string description() const;

  // --- data: as sendmsg and recvmsg on a non-blocking socket; errno EPROTO where the peer's bytes are not its TLS ---
  // Bytes count as sent when they are in the socket. After a partial send the next call must begin with the bytes that
  // follow, the same ones as were offered.
  ssize_t send(const msghdr& message);
  // Takes all of a small message or, with EAGAIN, nothing; what the socket does not take goes with the next call of
  // `post` or `recv`. A stream uses either `post` or `send`.
  ssize_t post(const msghdr& message);
  ssize_t recv(const msghdr& message);
  // Whether bytes may have come that no poll of the socket tells of: recv until EAGAIN first.
  bool may_hold_input() const;

private:
  struct Free {
    void operator()(tls::Ssl* ssl) const;
  };
  bool flush();  // false: errno says why
  bool encrypt(const void* bytes, std::size_t count);
  bool has_backlog() const { return flushed_bytes_ < outgoing_.size(); }
  std::string error_text() const;

  const tls::OpenSsl& library_;
  int fd_;
  std::string key_;
  std::uint64_t rekey_bytes_;
  std::unique_ptr<tls::Ssl, Free> ssl_;
  std::vector<char> outgoing_;  // encrypted; the socket has the first `flushed_bytes_` of it
  std::string failure_;
  bool is_broken_ = false;

  mutable std::mutex mutex_;  // protects what follows, and ssl_ once the set-up is done
  std::size_t flushed_bytes_ = 0;
  std::size_t encrypted_bytes_ = 0;  // of what `send` is offered, in `outgoing_`
  std::uint64_t key_used_bytes_ = 0;
  bool may_hold_input_ = true;
  int read_errno_ = 0;  // found after bytes that were given first
};

}  // namespace holmes
