#include "holmes/nccl/loaded_elf.hpp"

#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "holmes/core/error.hpp"
#include "holmes/core/types.hpp"

namespace holmes::nccl {
namespace {

// Relocations that put a symbol's address into a slot.
bool is_symbol_slot(unsigned long type) {
#if defined(__x86_64__)
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT || type == R_X86_64_64;
#elif defined(__aarch64__)
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT || type == R_AARCH64_ABS64;
#else
  static_cast<void>(type);
  throw UsageError(
      "this machine's kind of processor is not known to the code that separates NCCL images (x86-64 and AArch64 are); "
      "use one NIC selection for all NCCL communicators of a process");
#endif
}

struct Dynamic {
  const ElfW(Sym) * symbols = nullptr;
  const char* strings = nullptr;
  const ElfW(Rela) * relocations = nullptr;
  std::size_t relocation_bytes = 0;
  const ElfW(Rela) * jumps = nullptr;
  std::size_t jump_bytes = 0;
};

Dynamic read_dynamic(const link_map& map) {
  // The loader stores absolute addresses in most places; where it leaves them relative they are below the base.
  const auto address = [&](const ElfW(Dyn) & entry) {
    return entry.d_un.d_ptr < map.l_addr ? entry.d_un.d_ptr + map.l_addr : entry.d_un.d_ptr;
  };
  Dynamic dynamic;
  for (const ElfW(Dyn)* entry = map.l_ld; entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB:
        dynamic.symbols = reinterpret_cast<const ElfW(Sym)*>(address(*entry));
        break;
      case DT_STRTAB:
        dynamic.strings = reinterpret_cast<const char*>(address(*entry));
        break;
      case DT_RELA:
        dynamic.relocations = reinterpret_cast<const ElfW(Rela)*>(address(*entry));
        break;
      case DT_RELASZ:
        dynamic.relocation_bytes = entry->d_un.d_val;
        break;
      case DT_JMPREL:
        dynamic.jumps = reinterpret_cast<const ElfW(Rela)*>(address(*entry));
        break;
      case DT_PLTRELSZ:
        dynamic.jump_bytes = entry->d_un.d_val;
        break;
      default:
        break;
    }
  }
  return dynamic;
}

}  // namespace

LoadedElf::LoadedElf(const link_map& map) {
  const Dynamic dynamic = read_dynamic(map);
  const auto collect = [&](const ElfW(Rela) * first, std::size_t bytes) {
    if (first == nullptr) return;
    for (const ElfW(Rela)* entry = first; entry < first + bytes / sizeof(*first); ++entry) {
      const auto& symbol = dynamic.symbols[ELF64_R_SYM(entry->r_info)];
      const int type = ELF64_ST_TYPE(symbol.st_info);
      if (!is_symbol_slot(ELF64_R_TYPE(entry->r_info)) || symbol.st_name == 0) continue;
      // A hidden definition is never anybody else's, and an indirect function or a thread variable has no plain
      // address.
      const bool is_plain = type == STT_FUNC || type == STT_OBJECT || type == STT_NOTYPE;
      const bool is_own = symbol.st_shndx != SHN_UNDEF && is_plain;
      slots_.push_back({dynamic.strings + symbol.st_name,
                        is_own ? reinterpret_cast<void*>(map.l_addr + symbol.st_value) : nullptr,
                        reinterpret_cast<void**>(map.l_addr + entry->r_offset), entry->r_addend});
    }
  };
  collect(dynamic.relocations, dynamic.relocation_bytes);
  collect(dynamic.jumps, dynamic.jump_bytes);

  struct Search {
    const link_map& map;
    LoadedElf& elf;
  } search{map, *this};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& [wanted, elf] = *static_cast<Search*>(data);
        if (info->dlpi_addr != wanted.l_addr) return 0;
        const std::uintptr_t page = page_bytes();
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          if (header.p_type != PT_GNU_RELRO) continue;
          const std::uintptr_t begin = (info->dlpi_addr + header.p_vaddr) & ~(page - 1);
          const std::uintptr_t end = (info->dlpi_addr + header.p_vaddr + header.p_memsz) & ~(page - 1);
          elf.relro_begin_ = reinterpret_cast<char*>(begin);
          elf.relro_bytes_ = end - begin;
        }
        return 1;
      },
      &search);
}

int LoadedElf::bind_own_symbols() {
  std::vector<std::pair<void**, void*>> changes;
  for (const Slot& slot : slots_) {
    if (slot.own_address == nullptr) continue;
    void* const wanted = static_cast<char*>(slot.own_address) + slot.addend;
    if (*slot.place != wanted) changes.emplace_back(slot.place, wanted);
  }
  write(changes);
  return static_cast<int>(changes.size());
}

int LoadedElf::redirect(const std::string& symbol, void* function) {
  std::vector<std::pair<void**, void*>> changes;
  for (const Slot& slot : slots_)
    if (slot.own_address == nullptr && symbol == slot.symbol) changes.emplace_back(slot.place, function);
  write(changes);
  return static_cast<int>(changes.size());
}

void LoadedElf::write(const std::vector<std::pair<void**, void*>>& changes) const {
  const auto protect = [&](int protection) {
    if (relro_bytes_ == 0 || ::mprotect(relro_begin_, relro_bytes_, protection) == 0) return;
    throw SystemError("cannot change the protection of a loaded NCCL image: " + errno_text(errno),
                      {.system_errno = errno});
  };
  if (changes.empty()) return;
  protect(PROT_READ | PROT_WRITE);
  for (const auto& [place, value] : changes) *place = value;
  protect(PROT_READ);
}

}  // namespace holmes::nccl
