// What ranks tell each other in front of a collective: Signature, and its form on the wire.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holmes/core/options.hpp"
#include "holmes/core/types.hpp"
#include "holmes/group/group.hpp"

namespace holmes {

// What all ranks must agree on; it travels in front of every collective, on every pair.
struct Signature {
  OpCode op = OpCode::barrier;
  DType dtype = DType::uint8;
  std::optional<ReduceOp> reduction;
  std::optional<int> root;
  std::uint64_t sequence = 0;
  Form form = Form::flat;
  std::uint64_t announced_bytes = 0;         // of a hierarchical operation, which moves them on other communicators
  std::uint32_t counts_digest = 0;           // of counts, where the blocks do not say them, and the place in a list
  std::optional<int> average_over{};         // see CallOptions; not compared
  std::uint64_t count = 0;                   // elements of this rank's buffer, for the flight recorder; not compared
  std::shared_ptr<const WholeCall> whole{};  // what it is a step of; then that is compared and told
};

// Whether each rank is done once its own part is: of an operation with a root, not of the announcement of one.
inline bool ends_locally(const Group& group, const Signature& signature) {
  return group.local_completion && signature.root && signature.form == Form::flat;
}

// What all ranks' counts are compared by; not 0.
std::uint32_t digest_of_counts(const std::vector<Buffer>& buffers);

// The same where a call is one of a list; a call of its own has the digest that it is given.
std::uint32_t digest_in_list(std::uint32_t counts_digest, const ListPlace& place);

// "all_reduce #17 (float32, sum) of communicator 'dp0'".
std::string describe(const Signature& signature, const std::string& communicator);

RecordedCall recorded_call(const Signature& signature);

// What travels in front of the payload, in host byte order (little-endian machines only; checked by the handshake).
struct CollectiveHeader {
  std::uint32_t magic;
  OpCode op;
  DType dtype;
  std::uint8_t reduction;  // 255: none
  Form form;
  std::int32_t root;  // -1: none; below that: the digest of a whole's counts (on the wire only)
  std::uint32_t slice_bytes;
  std::uint64_t sequence;
  std::uint64_t payload_bytes;   // that follow
  std::uint64_t expected_bytes;  // that the sender of this header expects back
  std::uint64_t announced_bytes;
  CopyVote::Ballot ballot;
};
inline constexpr std::size_t collective_header_bytes = sizeof(CollectiveHeader);
// A cache line: what follows in a shared-memory ring stays aligned.
static_assert(sizeof(CollectiveHeader) == 64);

CollectiveHeader make_header(const Signature& signature, std::size_t slice_bytes, std::uint64_t payload_bytes,
                             std::uint64_t expected_bytes, const CopyVote::Ballot& ballot);
// Whether who sent `theirs` called the same as who sent `mine`.
bool is_same_call(const CollectiveHeader& mine, const CollectiveHeader& theirs);
// Throws MismatchError where `peer` called something else, ProtocolError where that is no header.
void check_header(const CollectiveHeader& mine, const CollectiveHeader& theirs, const Group& group, int peer);

}  // namespace holmes
