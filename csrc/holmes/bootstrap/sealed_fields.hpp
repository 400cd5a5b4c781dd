// SealedFields: fields in a Store, each with a proof that a rank of this job wrote it there.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "holmes/core/fields.hpp"

namespace holmes {

// What the proof of a field is made of, beside its value and its place among the fields.
struct Seal {
  std::string secret;  // the one the ranks were given; empty: the proof is a checksum, which anybody can make
  std::string key;     // of the Store; what is written under one cannot be put under another
};

// Each field is followed by an HMAC-SHA256 of seal.key, its position and its value, 128 bits of it.
class SealedWriter {
public:
  explicit SealedWriter(Seal seal) : seal_(std::move(seal)) {}
  void add(const std::string& field);
  void add(std::uint64_t number) { add(std::to_string(number)); }
  void add(std::optional<int> number) { add(number ? std::to_string(*number) : ""); }
  std::string take() { return writer_.take(); }

private:
  Seal seal_;
  std::uint64_t position_ = 0;
  FieldWriter writer_;
};

// Reads them in the same order. Every method throws ProtocolError naming `writer` and the field where that was changed,
// or where it makes no sense; the constructor where no field is of this job.
class SealedReader {
public:
  // `written`: what this process wrote, where `bytes` is its rank's: each field must be the same.
  SealedReader(const std::string& bytes, std::string writer, const Seal& seal, const std::string* written = nullptr);
  std::string text(const std::string& name);
  std::uint64_t number(const std::string& name, std::uint64_t max = std::numeric_limits<std::uint64_t>::max());
  bool flag(const std::string& name) { return number(name, 1) == 1; }
  std::optional<int> optional_number(const std::string& name);

private:
  struct Field {
    std::string value;
    bool is_genuine = false;
  };
  const std::string& next(const std::string& name);
  [[noreturn]] void refuse(const std::string& name) const;

  std::string writer_;
  std::vector<Field> fields_;
  bool is_anothers_ = false;  // a field has a proof, but is not what `written` says
  std::size_t next_ = 0;
};

}  // namespace holmes
