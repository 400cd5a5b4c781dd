// LoadedElf: a shared library in memory, whose symbol slots can be pointed elsewhere.
#pragma once

#include <link.h>

#include <functional>
#include <string>
#include <vector>

namespace holmes::nccl {

// A slot through which a library reaches a symbol (its own or another library's).
struct Slot {
  const char* symbol;
  void* own_address;  // where the library itself defines the symbol; null where it imports it
  void** place;
  std::ptrdiff_t addend;
};

// Not thread-safe; use it before anybody else calls the library.
class LoadedElf {
public:
  // Throws UsageError where this machine's kind of relocations is not known (x86-64 and AArch64 are).
  explicit LoadedElf(const link_map& map);

  // Every slot with a named symbol.
  const std::vector<Slot>& slots() const { return slots_; }
  // Points every slot whose symbol the library defines at that definition. Returns how many went elsewhere before.
  int bind_own_symbols();
  // Points every slot of the imported `symbol` at `function`. Returns how many there are.
  int redirect(const std::string& symbol, void* function);

private:
  // Sets slots while the part that the loader has made read-only is writable. Throws SystemError where the system
  // refuses that.
  void write(const std::vector<std::pair<void**, void*>>& changes) const;

  std::vector<Slot> slots_;
  char* relro_begin_ = nullptr;
  std::size_t relro_bytes_ = 0;
};

}  // namespace holmes::nccl
