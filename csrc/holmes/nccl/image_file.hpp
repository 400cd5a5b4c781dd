// ImageFile: a second file with the code of a shared library, which the loader takes for another library.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "holmes/core/descriptors.hpp"

namespace holmes::nccl {

// A part of the file that the image leaves empty, and where it goes.
struct Hole {
  off_t offset_bytes = 0;  // in the original
  std::size_t bytes = 0;
  std::size_t address = 0;  // relative to the base of the loaded library
  int protection = 0;       // PROT_*
};

// Keep the descriptor open as long as the image is loaded: its number is part of the name that the loader remembers.
struct ImageFile {
  UniqueFd fd;
  std::string form;  // "sparse" or "copy"
  std::vector<Hole> holes;
  std::string place;  // folder of a copy
};

// In memory, without the GPU code (nearly all of a libnccl), whose pages the caller maps from the original: a few MiB,
// a few milliseconds. The library gets another SONAME, so that nobody who needs the original is given the image.
// Throws SystemError where the system refuses, UsageError where the file is no shared library of this machine.
ImageFile make_sparse_image(const std::string& original, int original_fd);

// The whole file, without a name: shares the original's blocks where the file system can, else as large as it is. In
// the first folder of `folders` that has room. Same SONAME change, same errors.
ImageFile make_copied_image(const std::string& original, int original_fd, const std::vector<std::string>& folders);

}  // namespace holmes::nccl
