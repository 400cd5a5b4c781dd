// Handshake: two ranks prove the job's secret to each other on a fresh socket before anything else is said on it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "holmes/bootstrap/sha256.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/transport/connection.hpp"

namespace holmes {

inline constexpr std::uint16_t protocol_version = 27;
inline constexpr std::size_t hello_bytes = 50;
inline constexpr std::size_t max_rails = 64;  // of a pair of ranks
inline constexpr int max_far_streams = 16;    // of one purpose over a rail that is far

// What each side says first. The connecting side says what the connection is for; the other repeats it.
struct Hello {
  std::uint16_t version = protocol_version;
  Purpose purpose = Purpose::control;
  std::uint8_t rail = 0;                 // number in RankInfo::rails of both
  std::uint8_t streams = 1;              // connections of this purpose over this rail, as the connecting side chose
  std::uint8_t stream = 0;               // number of this one
  std::uint32_t rank = 0;                // of the side that speaks
  std::array<std::uint8_t, 16> group{};  // group_hash of the communicator's name
  std::array<std::uint8_t, 16> nonce{};  // random

  // "HOLMES\r\n", then the fields in the order above, little endian.
  std::string encode() const;
  // Nothing where the length or the first eight bytes are wrong; any other field may hold anything.
  static std::optional<Hello> decode(const std::string& bytes);
};

// What the ranks of one communicator prove to each other: that they know `secret`, the job's, and saw the same records
// (`records`, their digest) with everybody's TLS, clusters, NICs and addresses.
std::string group_secret(const std::string& secret, const Digest& records);

std::array<std::uint8_t, 16> group_hash(const std::string& communicator_name);

// One side of the handshake on a non-blocking socket:
//   connecting side                    listening side
//   hello                       ->     checks it, drops a stranger
//                               <-     hello
//   HMAC("connect", hellos)     ->     checks it, drops who does not know the secret
//                               <-     HMAC("listen", hellos) [and a descriptor, on a Unix socket]
// Every message has a fixed length. One thread at a time.
class Handshake {
public:
  enum class Step {
    waiting,   // for the socket: see events()
    verified,  // listening side: the peer proved the secret; call confirm() or drop it
    done,
    failed,  // see failure()
  };
  // Reason to refuse a hello; empty: welcome.
  using Check = std::function<std::string(const Hello&)>;

  // The connecting side. `takes_descriptor`: the peer passes one with its proof.
  static Handshake connecting(const Hello& own, std::uint32_t peer_rank, std::string secret, bool takes_descriptor);
  // The listening side: `check` sees the peer's hello before anything is answered.
  static Handshake listening(std::uint32_t own_rank, std::string secret, Check check);

  // Goes as far as the socket allows.
  Step step(int fd);
  short events() const;  // what to poll for while waiting
  // Listening side, once verified: sends the own proof, with `descriptor` (borrowed until done) where one is given.
  void confirm(std::optional<int> descriptor);

  const Hello& peer() const { return peer_; }
  const std::string& failure() const { return failure_; }
  // The peer closed the connection when it had seen this side's proof: the secrets differ.
  bool proof_refused() const { return proof_refused_; }
  bool awaits_proof() const { return state_ == State::proof; }
  std::optional<std::uint16_t> other_version() const { return other_version_; }
  // Once done: 32 secret bytes of this connection alone, the same on both sides.
  std::string connection_key() const;
  UniqueFd take_descriptor() { return std::move(descriptor_); }

private:
  enum class State { hello, proof, verified, last_words, done, failed };

  Handshake(bool is_listening, std::string secret) : is_listening_(is_listening), secret_(std::move(secret)) {}
  bool flush(int fd);                    // false: not all sent yet, or failed
  bool fill(int fd, std::size_t bytes);  // false: not all received yet, or failed
  void fail(std::string reason);
  void take_hello();
  void take_proof();
  Digest proof(bool of_listening_side) const;

  bool is_listening_;
  std::string secret_;
  Check check_;
  State state_ = State::hello;
  Hello own_, peer_;
  std::string connecting_hello_, listening_hello_;  // as sent
  std::string output_, input_;
  std::optional<int> attached_;  // descriptor to pass with the next byte
  bool takes_descriptor_ = false;
  UniqueFd descriptor_;
  std::string failure_;
  bool proof_refused_ = false;
  std::optional<std::uint16_t> other_version_;
};

}  // namespace holmes
