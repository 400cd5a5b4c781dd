// From how many bytes on the hierarchical form of an operation is the faster one: given, or measured.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "holmes/comm/communicator.hpp"

namespace holmes {

// Collective over `flat`: what the ranks that were given a value say. Throws UsageError on all ranks where they differ.
std::optional<std::uint64_t> agree_given_bytes(Communicator& flat, const std::optional<std::uint64_t>& given);

// Collective over `flat`: times an all_reduce of growing sizes in both forms until `hierarchical` (which is given what
// to reduce and blocks) wins or the time for it is spent; then goes by the trend. The same on all ranks. Returns
// never_hierarchical where it does not win.
std::uint64_t measure_hierarchical_min_bytes(Communicator& flat, const std::function<void(const Buffer&)>& hierarchical,
                                             Duration timeout);

}  // namespace holmes
