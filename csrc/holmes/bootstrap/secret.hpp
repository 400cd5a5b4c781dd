// Secret: the job's shared secret, random bytes and their text form.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "holmes/core/env.hpp"

namespace holmes {

// Cryptographically random bytes from the kernel. Throws SystemError.
std::string random_bytes(std::size_t count);

std::string to_hex(const std::string& bytes);

// The secret this rank was given: `option`, else HOLMES_SECRET, else the file HOLMES_SECRET_FILE names. Nothing where
// none of them is set. Throws UsageError where the file cannot be read or is empty, or the secret is short or of too
// few different bytes.
std::optional<std::string> given_secret(const std::string& option, const Env& env);

}  // namespace holmes
