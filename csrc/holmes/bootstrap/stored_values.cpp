#include "holmes/bootstrap/stored_values.hpp"

#include <charconv>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

constexpr std::size_t shown_bytes = 40;

}  // namespace

const std::string* StoredValues::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

const std::string* StoredValues::missing(std::span<const std::string> keys) const {
  for (const std::string& key : keys)
    if (!find(key)) return &key;
  return nullptr;
}

void StoredValues::set(const std::string& key, std::string value) {
  const std::string* const old = find(key);
  const auto freed = old ? key.size() + old->size() : 0;
  const auto needed = key.size() + value.size();
  if (bytes_ - freed > max_bytes_ || needed > max_bytes_ - (bytes_ - freed))
    throw UsageError("the store is full: key '" + key + "' does not fit; store less");
  values_[key] = std::move(value);
  bytes_ += needed - freed;
}

std::int64_t StoredValues::add(const std::string& key, std::int64_t amount) {
  std::int64_t number = 0;
  if (const std::string* const old = find(key)) {
    const char* const end = old->data() + old->size();
    const auto [parsed, error] = std::from_chars(old->data(), end, number);
    if (error != std::errc() || parsed != end)
      throw UsageError("the store key '" + key + "' holds '" + old->substr(0, shown_bytes) +
                       "', which is no whole number of 64 bits; add to a key that was only added to");
  }
  if (__builtin_add_overflow(number, amount, &number))
    throw UsageError("the store key '" + key + "' cannot take " + std::to_string(amount) +
                     " more: the sum has more than 64 bits");
  set(key, std::to_string(number));
  return number;
}

std::string StoredValues::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  const std::string* const old = find(key);
  if (old ? *old != expected : !expected.empty()) return old ? *old : expected;
  set(key, desired);
  return desired;
}

std::size_t StoredValues::remove(std::span<const std::string> keys) {
  std::size_t removed = 0;
  for (const std::string& key : keys) {
    const auto found = values_.find(key);
    if (found == values_.end()) continue;
    bytes_ -= key.size() + found->second.size();
    values_.erase(found);
    ++removed;
  }
  return removed;
}

}  // namespace holmes
