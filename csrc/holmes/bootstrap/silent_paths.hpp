// Paths between RDMA ports that did not answer when this process tried them last. Where TCP would do as well they are
// not tried again for a while: each try costs a set-up seconds.
#pragma once

#include <optional>
#include <string>

#include "holmes/core/clock.hpp"

namespace holmes {

inline constexpr auto silence_is_remembered = std::chrono::minutes(10);

// Of one, "mlx5_0:1 fe80::1 -> fe80::2", how long ago that was; nothing where it is to be tried. All: thread-safe.
std::optional<Duration> silent_since(const std::string& path);
void remember_silent(const std::string& path);
// It has answered.
void forget_silent(const std::string& path);
// Of all paths; for tests.
void forget_silent_paths();

}  // namespace holmes
