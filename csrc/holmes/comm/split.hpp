// What a split of a communicator makes.
#pragma once

#include <optional>

#include "holmes/comm/communicator.hpp"

namespace holmes {

// Collective over `comm`, which was made with `options`: the options of the communicator that this rank's color gets,
// or nothing for color -1. `number` counts the splits of `comm`. Throws UsageError for other negative colors.
std::optional<CommunicatorOptions> split_options(Communicator& comm, const CommunicatorOptions& options, int number,
                                                 int color, int key);

}  // namespace holmes
