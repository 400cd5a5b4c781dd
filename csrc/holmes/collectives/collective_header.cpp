#include "holmes/collectives/collective_header.hpp"

#include <algorithm>

#include "holmes/core/error.hpp"
#include "holmes/reduce/codec.hpp"

namespace holmes {
namespace {

constexpr std::uint32_t header_magic = 0x484c4d31;  // "HLM1"
constexpr std::uint8_t no_reduction = 255;
constexpr std::int32_t no_root = -1;
// Above it -1, which is "none".
constexpr std::int32_t first_digest = -2;

class Fnv1a {
public:
  void add(std::uint64_t number) {
    for (std::size_t i = 0; i < sizeof number; ++i, number >>= 8) state_ = (state_ ^ (number & 255)) * 1099511628211u;
  }
  // Not 0.
  std::uint32_t value() const { return std::max<std::uint32_t>(static_cast<std::uint32_t>(state_ ^ state_ >> 32), 1); }

private:
  std::uint64_t state_ = 14695981039346656037u;
};

std::string compression_suffix(Form form) {
  if (form == Form::hierarchical) return "";
  const auto number = static_cast<std::uint8_t>(form);
  const auto codec = static_cast<Codec>(number & ~form_of_differences);
  return " with " + std::string(name(codec)) + " compression" + (is_rotated(codec) ? ", rotated" : "") +
         (number & form_of_differences ? ", of differences" : "");
}

std::string describe(const CollectiveHeader& header) {
  std::string text(name(header.op));
  text += " #" + std::to_string(header.sequence);
  if (static_cast<int>(header.dtype) < dtype_count) text += " " + std::string(name(header.dtype));
  if (header.reduction < reduce_op_count) text += " " + std::string(name(static_cast<ReduceOp>(header.reduction)));
  if (header.root >= 0) text += " root " + std::to_string(header.root);
  if (header.root <= first_digest)
    text += " with counts #" + std::to_string(first_digest - header.root) + " (a digest, also of the place in a list)";
  if (header.form == Form::wide) {
    if (header.announced_bytes > 0) text += " of " + std::to_string(header.announced_bytes) + " bytes";
    return text + " (a step of it that sends " + std::to_string(header.payload_bytes) + " and expects " +
           std::to_string(header.expected_bytes) + " bytes)";
  }
  if (header.form != Form::flat)
    return text + ", hierarchical" + compression_suffix(header.form) + ", of " +
           std::to_string(header.announced_bytes) + " bytes";
  return text + ", sending " + std::to_string(header.payload_bytes) + " and expecting " +
         std::to_string(header.expected_bytes) + " bytes";
}

// What the other ranks are told of it.
WholeCall told_by(const Signature& signature) {
  if (signature.whole) return *signature.whole;
  return {.op = signature.op,
          .dtype = signature.dtype,
          .reduction = signature.reduction,
          .root = signature.root,
          .form = signature.form,
          .bytes = signature.announced_bytes,
          .counts_digest = signature.counts_digest};
}

std::int32_t root_field(const WholeCall& told) {
  if (told.counts_digest > 0) return first_digest - static_cast<std::int32_t>(told.counts_digest >> 2);
  return told.root.value_or(no_root);
}

}  // namespace

std::uint32_t digest_of_counts(const std::vector<Buffer>& buffers) {
  Fnv1a digest;
  for (const Buffer& buffer : buffers) digest.add(buffer.count);
  return digest.value();
}

std::uint32_t digest_in_list(std::uint32_t counts_digest, const ListPlace& place) {
  if (place.length <= 1) return counts_digest;
  Fnv1a digest;
  for (const std::uint32_t number : {counts_digest, place.index, place.length}) digest.add(number);
  return digest.value();
}

std::string describe(const Signature& signature, const std::string& communicator) {
  const WholeCall told = told_by(signature);
  std::string text(name(told.op));
  text += " #" + std::to_string(signature.sequence) + " (" + std::string(name(told.dtype));
  if (told.reduction) text += ", " + std::string(name(*told.reduction));
  if (told.root) text += ", root " + std::to_string(*told.root);
  return text + ") of communicator '" + communicator + "'";
}

RecordedCall recorded_call(const Signature& signature) {
  return {.op = signature.op,
          .dtype = signature.dtype,
          .reduction = signature.reduction,
          .root = signature.root,
          .sequence = signature.sequence,
          .count = signature.count};
}

CollectiveHeader make_header(const Signature& signature, std::size_t slice_bytes, std::uint64_t payload_bytes,
                             std::uint64_t expected_bytes, const CopyVote::Ballot& ballot) {
  const WholeCall told = told_by(signature);
  return {header_magic,
          told.op,
          told.dtype,
          told.reduction ? static_cast<std::uint8_t>(*told.reduction) : no_reduction,
          told.form,
          root_field(told),
          static_cast<std::uint32_t>(slice_bytes),
          signature.sequence,
          payload_bytes,
          expected_bytes,
          told.bytes,
          ballot};
}

bool is_same_call(const CollectiveHeader& mine, const CollectiveHeader& theirs) {
  return theirs.magic == mine.magic && theirs.op == mine.op && theirs.dtype == mine.dtype &&
         theirs.reduction == mine.reduction && theirs.root == mine.root && theirs.sequence == mine.sequence &&
         theirs.form == mine.form && theirs.announced_bytes == mine.announced_bytes &&
         theirs.slice_bytes == mine.slice_bytes && theirs.payload_bytes == mine.expected_bytes &&
         theirs.expected_bytes == mine.payload_bytes;
}

void check_header(const CollectiveHeader& mine, const CollectiveHeader& theirs, const Group& group, int peer) {
  if (is_same_call(mine, theirs)) return;
  const ControlConnection& control = *group.controls[peer];
  const ErrorContext context{.rank = group.label(group.rank),
                             .peer = group.label(peer),
                             .host = control.host(),
                             .nic = control.nic(),
                             .system_errno = {}};
  if (theirs.magic != header_magic)
    throw ProtocolError("communicator '" + group.name + "': the stream of " + control.describe() +
                            " does not hold an operation where one is due; all processes must run the same version",
                        context);
  throw MismatchError("communicator '" + group.name + "': " + control.describe() + " called " + describe(theirs) +
                          ", but rank " + std::to_string(group.label(group.rank)) + " called " + describe(mine) +
                          " with it; all ranks must call the same operations in the same order with the same dtype, "
                          "count, reduction and root",
                      context);
}

}  // namespace holmes
