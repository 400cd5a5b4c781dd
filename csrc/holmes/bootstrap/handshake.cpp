#include "holmes/bootstrap/handshake.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>

#include "holmes/bootstrap/secret.hpp"
#include "holmes/core/error.hpp"

namespace holmes {
namespace {

constexpr std::string_view hello_magic = "HOLMES\r\n";
constexpr std::size_t proof_bytes = std::tuple_size_v<Digest>;

void put(std::string& bytes, std::uint64_t value, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) bytes += static_cast<char>(value >> (8 * i));
}

std::uint64_t take(const std::string& bytes, std::size_t& offset, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i) {
    value |= std::uint64_t{static_cast<std::uint8_t>(bytes[offset++])} << (8 * i);
  }
  return value;
}

std::string as_string(const Digest& digest) { return {digest.begin(), digest.end()}; }

std::array<std::uint8_t, 16> random_nonce() {
  std::array<std::uint8_t, 16> nonce;
  std::ranges::copy(random_bytes(nonce.size()), nonce.begin());
  return nonce;
}

// Room for one descriptor as ancillary data.
union DescriptorControl {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

}  // namespace

std::string Hello::encode() const {
  std::string bytes(hello_magic);
  put(bytes, version, 2);
  put(bytes, static_cast<std::uint8_t>(purpose), 1);
  put(bytes, rail, 1);
  put(bytes, streams, 1);
  put(bytes, stream, 1);
  put(bytes, rank, 4);
  bytes.append(group.begin(), group.end());
  bytes.append(nonce.begin(), nonce.end());
  return bytes;
}

std::optional<Hello> Hello::decode(const std::string& bytes) {
  if (bytes.size() != hello_bytes || !bytes.starts_with(hello_magic)) return std::nullopt;
  std::size_t offset = hello_magic.size();
  Hello hello;
  hello.version = static_cast<std::uint16_t>(take(bytes, offset, 2));
  hello.purpose = static_cast<Purpose>(take(bytes, offset, 1));
  hello.rail = static_cast<std::uint8_t>(take(bytes, offset, 1));
  hello.streams = static_cast<std::uint8_t>(take(bytes, offset, 1));
  hello.stream = static_cast<std::uint8_t>(take(bytes, offset, 1));
  hello.rank = static_cast<std::uint32_t>(take(bytes, offset, 4));
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(offset), hello.group.size(), hello.group.begin());
  offset += hello.group.size();
  std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(offset), hello.nonce.size(), hello.nonce.begin());
  return hello;
}

std::string group_secret(const std::string& secret, const Digest& records) {
  return as_string(hmac_sha256(secret, "holmes group" + as_string(records)));
}

std::array<std::uint8_t, 16> group_hash(const std::string& communicator_name) {
  std::array<std::uint8_t, 16> hash;
  std::copy_n(sha256(communicator_name).begin(), hash.size(), hash.begin());
  return hash;
}

Handshake Handshake::connecting(const Hello& own, std::uint32_t peer_rank, std::string secret, bool takes_descriptor) {
  Handshake handshake(false, std::move(secret));
  handshake.own_ = own;
  handshake.own_.nonce = random_nonce();
  handshake.takes_descriptor_ = takes_descriptor;
  handshake.output_ = handshake.connecting_hello_ = handshake.own_.encode();
  handshake.check_ = [own, peer_rank](const Hello& peer) -> std::string {
    if (peer.group != own.group) return "it belongs to another communicator";
    if (peer.rank != peer_rank) return "it is rank " + std::to_string(peer.rank);
    const auto connection = [](const Hello& hello) {
      return std::tuple(hello.purpose, hello.rail, hello.streams, hello.stream);
    };
    if (connection(peer) != connection(own)) return "it answers for another connection";
    return "";
  };
  return handshake;
}

Handshake Handshake::listening(std::uint32_t own_rank, std::string secret, Check check) {
  Handshake handshake(true, std::move(secret));
  handshake.own_.rank = own_rank;
  handshake.check_ = std::move(check);
  return handshake;
}

short Handshake::events() const { return output_.empty() ? POLLIN : POLLOUT; }

void Handshake::fail(std::string reason) {
  state_ = State::failed;
  failure_ = std::move(reason);
}

Handshake::Step Handshake::step(int fd) {
  while (state_ != State::failed && state_ != State::done && state_ != State::verified) {
    if (!flush(fd)) break;
    if (state_ == State::last_words) {
      state_ = State::done;
    } else if (!fill(fd, state_ == State::hello ? hello_bytes : proof_bytes)) {
      break;
    } else if (state_ == State::hello) {
      take_hello();
    } else {
      take_proof();
    }
  }
  switch (state_) {
    case State::failed:
      return Step::failed;
    case State::done:
      return Step::done;
    case State::verified:
      return Step::verified;
    default:
      return Step::waiting;
  }
}

void Handshake::confirm(std::optional<int> descriptor) {
  attached_ = descriptor;
  output_ = as_string(proof(true));
  state_ = State::last_words;
}

void Handshake::take_hello() {
  (is_listening_ ? connecting_hello_ : listening_hello_) = input_;
  const auto hello = Hello::decode(input_);
  input_.clear();
  if (!hello) return fail("it does not speak this protocol");
  peer_ = *hello;
  std::string refusal;
  if (peer_.version != protocol_version) {
    other_version_ = peer_.version;
    refusal = "it speaks protocol version " + std::to_string(peer_.version) + ", this side version " +
              std::to_string(protocol_version);
  } else {
    refusal = check_(peer_);
  }
  if (!is_listening_) {
    if (!refusal.empty()) return fail(refusal);
    output_ = as_string(proof(false));
  } else {
    // A peer of another version gets the hello all the same: it learns why it is dropped.
    if (!refusal.empty() && !other_version_) return fail(refusal);
    const auto rank = own_.rank;
    own_ = peer_;
    own_.version = protocol_version;
    own_.rank = rank;
    own_.nonce = random_nonce();
    output_ = listening_hello_ = own_.encode();
  }
  state_ = State::proof;
}

void Handshake::take_proof() {
  if (other_version_) return fail("it goes on in protocol version " + std::to_string(*other_version_));
  Digest received;
  std::ranges::copy(input_, received.begin());
  input_.clear();
  if (!equal_digests(received, proof(!is_listening_))) return fail("its proof of the secret is wrong");
  state_ = is_listening_ ? State::verified : State::done;
}

Digest Handshake::proof(bool of_listening_side) const {
  const std::string role = of_listening_side ? "holmes listen" : "holmes connect";
  return hmac_sha256(secret_, role + connecting_hello_ + listening_hello_);
}

std::string Handshake::connection_key() const {
  return as_string(hmac_sha256(secret_, "holmes tls" + connecting_hello_ + listening_hello_));
}

bool Handshake::flush(int fd) {
  while (!output_.empty()) {
    iovec piece{output_.data(), output_.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    DescriptorControl control{};
    if (attached_) {
      message.msg_control = control.bytes;
      message.msg_controllen = sizeof(control.bytes);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &*attached_, sizeof(int));
    }
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (sent < 0) {
      fail("the connection broke: " + errno_text(errno));
      return false;
    }
    attached_.reset();
    output_.erase(0, static_cast<std::size_t>(sent));
  }
  return true;
}

bool Handshake::fill(int fd, std::size_t bytes) {
  while (input_.size() < bytes) {
    std::array<char, std::max(hello_bytes, proof_bytes)> chunk;
    iovec piece{chunk.data(), bytes - input_.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    DescriptorControl control{};
    if (takes_descriptor_) {  // else the kernel drops what a stranger may pass
      message.msg_control = control.bytes;
      message.msg_controllen = sizeof(control.bytes);
    }
    const ssize_t got = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (got <= 0) {
      const int error = errno;
      proof_refused_ = !is_listening_ && state_ == State::proof;
      fail(got == 0 ? "it closed the connection" : "the connection broke: " + errno_text(error));
      return false;
    }
    if (takes_descriptor_ && (message.msg_flags & MSG_CTRUNC) != 0)
      throw SystemError("cannot take over a shared memory segment: no descriptor is left" + limit_text(EMFILE),
                        {.system_errno = EMFILE});
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header), sizeof(descriptor));
      descriptor_.reset(descriptor);
    }
    input_.append(chunk.data(), static_cast<std::size_t>(got));
    if (state_ == State::hello && input_.compare(0, hello_magic.size(), hello_magic.substr(0, input_.size())) != 0) {
      fail("it does not speak this protocol");
      return false;
    }
  }
  return true;
}

}  // namespace holmes
