#include "holmes/comm/overlap.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

const std::byte* end_of(const Buffer& buffer) { return buffer.begin() + buffer.bytes(); }

bool share(const Buffer& a, const Buffer& b) {
  return a.count != 0 && b.count != 0 && a.begin() < end_of(b) && b.begin() < end_of(a);
}

std::string place(const char* what, std::size_t index, std::size_t size) {
  return size == 1 ? std::string("the ") + what : std::string(what) + " " + std::to_string(index);
}

[[noreturn]] void refuse(const char* operation, const std::string& one, const std::string& other, bool is_one_written) {
  throw UsageError(std::string(operation) + ": " + one + " and " + other + " share memory, and " +
                   (is_one_written ? "both are written" : "one is written while the other is read") +
                   "; pass a copy of one, or (in place) this rank's whole part");
}

// In order of address: as parts of one buffer are.
bool is_ascending(std::span<const Buffer> buffers) {
  const std::byte* end = nullptr;
  for (const Buffer& buffer : buffers) {
    if (buffer.count == 0) continue;
    if (buffer.begin() < end) return false;
    end = end_of(buffer);
  }
  return true;
}

void check_outputs(const char* operation, std::span<const Buffer> outputs) {
  if (is_ascending(outputs)) return;
  std::vector<const Buffer*> sorted;
  for (const Buffer& output : outputs)
    if (output.count != 0) sorted.push_back(&output);
  std::ranges::sort(sorted, {}, [](const Buffer* buffer) { return buffer->begin(); });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (!share(*sorted[i - 1], *sorted[i])) continue;
    const auto [first, second] = std::minmax({sorted[i - 1] - outputs.data(), sorted[i] - outputs.data()});
    refuse(operation, place("output", static_cast<std::size_t>(first), 0),
           place("output", static_cast<std::size_t>(second), 0), true);
  }
}

}  // namespace

void check_apart(const char* operation, std::span<const Buffer> outputs, std::size_t own_output,
                 std::span<const Buffer> inputs, std::size_t own_input) {
  check_outputs(operation, outputs);
  const std::byte* first = nullptr;  // what all outputs span
  const std::byte* last = nullptr;
  for (const Buffer& output : outputs) {
    if (output.count == 0) continue;
    if (!first || output.begin() < first) first = output.begin();
    last = std::max<const std::byte*>(last, end_of(output));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].count == 0 || inputs[i].begin() >= last || end_of(inputs[i]) <= first) continue;
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      if (!share(outputs[o], inputs[i])) continue;
      if (o == own_output && i == own_input && outputs[o].data == inputs[i].data) continue;
      refuse(operation, place("output", o, outputs.size()), place("input", i, inputs.size()), false);
    }
  }
}

}  // namespace holmes
