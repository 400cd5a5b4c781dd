#include "sim/process_image.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "holmes/core/env.hpp"

namespace holmes::sim {
namespace {

std::byte* address(std::uintptr_t value) { return reinterpret_cast<std::byte*>(value); }

// Behind the last slot of the table through which the library calls others: the loader fills it while it is used.
std::uintptr_t end_of_call_table(const ElfW(Dyn) * entry, std::uintptr_t base) {
  constexpr std::size_t loaders_own = 3;
  std::uintptr_t begin = 0;
  std::size_t slots = 0;
  for (; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_PLTGOT) begin = entry->d_un.d_ptr;
    if (entry->d_tag == DT_PLTRELSZ) slots = entry->d_un.d_val / sizeof(ElfW(Rela));
  }
  if (begin == 0) return 0;
  return (begin < base ? base + begin : begin) + (loaders_own + slots) * sizeof(void*);
}

int look(dl_phdr_info* info, std::size_t, void* found_at) {
  auto& found = *static_cast<LibraryMemory*>(found_at);
  Dl_info library{};
  if (::dladdr(reinterpret_cast<const void*>(&holmes::host_name), &library) == 0) return 0;
  const auto base = static_cast<std::uintptr_t>(info->dlpi_addr);
  if (base != reinterpret_cast<std::uintptr_t>(library.dli_fbase)) return 0;
  std::uintptr_t begin = 0, end = 0;
  for (const ElfW(Phdr) & part : std::span(info->dlpi_phdr, info->dlpi_phnum)) {
    const std::uintptr_t first = base + part.p_vaddr, last = first + part.p_memsz;
    if (part.p_type == PT_LOAD && (part.p_flags & PF_W) != 0) begin = std::max(begin, first), end = last;
    if (part.p_type == PT_GNU_RELRO) begin = std::max(begin, last);
    if (part.p_type == PT_DYNAMIC)
      begin = std::max(begin, end_of_call_table(reinterpret_cast<const ElfW(Dyn)*>(first), base));
    if (part.p_type == PT_TLS && info->dlpi_tls_data)
      found.thread_variables = {static_cast<std::byte*>(info->dlpi_tls_data), part.p_memsz};
  }
  found.variables = {address(begin), address(end)};
  return 1;
}

}  // namespace

const LibraryMemory& library_memory() {
  static const LibraryMemory memory = [] {
    LibraryMemory found;
    if (::dl_iterate_phdr(look, &found) == 0 || found.variables.empty() || found.thread_variables.empty()) {
      std::fprintf(stderr, "the library's variables are not found\n");
      std::abort();
    }
    return found;
  }();
  return memory;
}

}  // namespace holmes::sim
