#include "holmes/core/fields.hpp"

#include <charconv>

#include "holmes/core/error.hpp"

namespace holmes {

std::string FieldReader::text() {
  const auto colon = bytes_.find(':', offset_);
  if (colon == std::string::npos) refuse();
  const auto size = parse(bytes_.substr(offset_, colon - offset_));
  if (size > bytes_.size() - colon - 1) refuse();
  offset_ = colon + 1 + size;
  return bytes_.substr(colon + 1, size);
}

std::uint64_t FieldReader::number(std::uint64_t max) {
  const auto value = parse(text());
  return value <= max ? value : refuse();
}

std::optional<int> FieldReader::optional_number() {
  const auto field = text();
  if (field.empty()) return std::nullopt;
  const auto value = parse(field);
  return value <= std::numeric_limits<int>::max() ? static_cast<int>(value) : static_cast<int>(refuse());
}

std::uint64_t FieldReader::refuse() const {
  throw ProtocolError("what " + writer_ +
                      " wrote makes no sense; does another program, or another job, use the same store, or does it run "
                      "another version of Holmes?");
}

std::uint64_t FieldReader::parse(const std::string& field) const {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  return error == std::errc{} && end == field.data() + field.size() ? value : refuse();
}

}  // namespace holmes
