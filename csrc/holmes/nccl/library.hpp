// Library: the libnccl that this machine has, found once per process. It is loaded before any image of it, stays
// loaded, and is never changed: it is the one torch uses too.
#pragma once

#include <string>
#include <vector>

#include "holmes/nccl/api.hpp"

namespace holmes::nccl {

struct Library {
  std::string path;      // of the file, links followed
  std::string found_by;  // "HOLMES_NCCL_LIBRARY", "already loaded", "Python package", "system"
  void* handle = nullptr;
  Api api;
};

// The first of: HOLMES_NCCL_LIBRARY, a libnccl that is already loaded, `package_paths` (the files of Python packages,
// which only Python knows), the system's. Decided at the first call that finds one; later calls return the same.
// Throws UsageError saying where was looked and what to install. Thread-safe.
const Library& stock_library(const std::vector<std::string>& package_paths = {});

}  // namespace holmes::nccl
