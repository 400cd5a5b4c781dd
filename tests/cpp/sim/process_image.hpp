// What a process has of its own of the library's variables, where many simulated ones share one loaded library.
#pragma once

#include <cstddef>
#include <span>

namespace holmes::sim {

struct LibraryMemory {
  std::span<std::byte> variables;         // static ones
  std::span<std::byte> thread_variables;  // of the one thread of this program
};

// Of libholmes as it is loaded here. Ends the program where it is not found.
const LibraryMemory& library_memory();

}  // namespace holmes::sim
