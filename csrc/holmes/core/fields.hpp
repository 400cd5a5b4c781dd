// Fields: a list of texts and numbers as bytes, for values of a Store and for what ranks send each other at set-up.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

namespace holmes {

// Fields as "length:bytes", one after the other.
class FieldWriter {
public:
  void add(const std::string& field) { bytes_ += std::to_string(field.size()) + ":" + field; }
  void add(std::uint64_t number) { add(std::to_string(number)); }
  void add(std::optional<int> number) { add(number ? std::to_string(*number) : ""); }
  std::string take() { return std::move(bytes_); }

private:
  std::string bytes_;
};

// Reads them in the same order. Every method throws ProtocolError naming `writer` where the bytes make no sense. Keeps
// both strings: they must outlive it.
class FieldReader {
public:
  FieldReader(const std::string& bytes, const std::string& writer) : bytes_(bytes), writer_(writer) {}
  std::string text();
  std::uint64_t number(std::uint64_t max = std::numeric_limits<std::uint64_t>::max());
  std::optional<int> optional_number();
  bool at_end() const { return offset_ == bytes_.size(); }
  [[noreturn]] std::uint64_t refuse() const;

private:
  std::uint64_t parse(const std::string& field) const;

  const std::string& bytes_;
  const std::string& writer_;
  std::size_t offset_ = 0;
};

}  // namespace holmes
