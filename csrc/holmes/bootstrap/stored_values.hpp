// StoredValues: what a store that holds its values itself does with them.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <string>

namespace holmes {

// One thread at a time.
class StoredValues {
public:
  explicit StoredValues(std::size_t max_bytes = std::numeric_limits<std::size_t>::max()) : max_bytes_(max_bytes) {}

  // Null where nobody has set it.
  const std::string* find(const std::string& key) const;
  // The first of `keys` that nobody has set; null: none.
  const std::string* missing(std::span<const std::string> keys) const;
  std::size_t size() const { return values_.size(); }
  // As AtomicStore's. UsageError where the value does not fit any more.
  void set(const std::string& key, std::string value);
  std::int64_t add(const std::string& key, std::int64_t amount);
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired);
  std::size_t remove(std::span<const std::string> keys);

private:
  std::size_t max_bytes_;
  std::size_t bytes_ = 0;
  std::map<std::string, std::string> values_;
};

}  // namespace holmes
