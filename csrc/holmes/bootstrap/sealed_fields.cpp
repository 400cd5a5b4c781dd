#include "holmes/bootstrap/sealed_fields.hpp"

#include <algorithm>
#include <charconv>

#include "holmes/bootstrap/secret.hpp"
#include "holmes/bootstrap/sha256.hpp"
#include "holmes/core/error.hpp"

namespace holmes {
namespace {

constexpr std::size_t sealing_bytes = 16;

std::string proof_of(const Seal& seal, std::uint64_t position, const std::string& value) {
  FieldWriter content;
  content.add("holmes field");
  content.add(seal.key);
  content.add(position);
  content.add(value);
  const Digest digest = hmac_sha256(seal.secret, content.take());
  return to_hex({digest.begin(), digest.begin() + sealing_bytes});
}

}  // namespace

void SealedWriter::add(const std::string& field) {
  writer_.add(field);
  writer_.add(proof_of(seal_, position_++, field));
}

SealedReader::SealedReader(const std::string& bytes, std::string writer, const Seal& seal, const std::string* written)
    : writer_(std::move(writer)) {
  FieldReader reader(bytes, writer_);
  std::optional<FieldReader> own;
  if (written != nullptr) own.emplace(*written, writer_);
  while (!reader.at_end()) {
    Field& field = fields_.emplace_back();
    field.value = reader.text();
    const std::string proof = reader.text();
    field.is_genuine = equal_texts(proof, proof_of(seal, fields_.size() - 1, field.value));
    if (own && !own->at_end()) {
      const std::string value = own->text();
      own->text();  // its proof
      is_anothers_ = is_anothers_ || (field.is_genuine && field.value != value);
      field.is_genuine = field.is_genuine && field.value == value;
    }
  }
  if (fields_.size() > 1 && std::ranges::none_of(fields_, &Field::is_genuine)) {
    throw ProtocolError(
        "what " + writer_ +
        " wrote into the store was not sealed with this rank's secret: their secrets differ, or only one "
        "of them was given one; give every rank the same HOLMES_SECRET or HOLMES_SECRET_FILE");
  }
}

const std::string& SealedReader::next(const std::string& name) {
  if (next_ >= fields_.size()) refuse(name);
  const Field& field = fields_[next_++];
  if (field.is_genuine) return field.value;
  throw ProtocolError("what " + writer_ + " wrote into the store was changed there: the field '" + name +
                      "' is not as that rank wrote it; " +
                      (is_anothers_ ? "another process has the same rank (give each its own RANK), or " : "") +
                      "somebody who can write the store interferes, or its memory fails: use a store that only this "
                      "job can write");
}

std::string SealedReader::text(const std::string& name) { return next(name); }

std::uint64_t SealedReader::number(const std::string& name, std::uint64_t max) {
  const std::string& field = next(name);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  if (error != std::errc{} || end != field.data() + field.size() || value > max) refuse(name);
  return value;
}

std::optional<int> SealedReader::optional_number(const std::string& name) {
  if (next_ < fields_.size() && fields_[next_].is_genuine && fields_[next_].value.empty()) {
    ++next_;
    return std::nullopt;
  }
  return static_cast<int>(number(name, std::numeric_limits<int>::max()));
}

void SealedReader::refuse(const std::string& name) const {
  throw ProtocolError("what " + writer_ + " wrote into the store makes no sense from the field '" + name +
                      "' on; does another job use the same store, or does it run another version of Holmes?");
}

}  // namespace holmes
