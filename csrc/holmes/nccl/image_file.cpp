#include "holmes/nccl/image_file.hpp"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"
#include "holmes/core/types.hpp"

namespace holmes::nccl {
namespace {

using Ehdr = ElfW(Ehdr);
using Phdr = ElfW(Phdr);
using Shdr = ElfW(Shdr);

// Sections with GPU code: nothing reads them before the first kernel is loaded.
constexpr const char* gpu_sections[] = {"__nv_relfatbin", ".nv_fatbin"};

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw UsageError(path + " cannot be loaded twice: " + reason + "; name another libnccl with HOLMES_NCCL_LIBRARY");
}

[[noreturn]] void fail(const std::string& what, int system_errno) {
  throw SystemError("cannot " + what + ": " + errno_text(system_errno) + limit_text(system_errno),
                    {.system_errno = system_errno});
}

// Reads parts of a file that must be there.
class Reader {
public:
  Reader(const std::string& path, int fd) : path_(path), fd_(fd) {}

  template <class T>
  std::vector<T> read(std::size_t offset_bytes, std::size_t count) const {
    std::vector<T> values(count);
    const std::size_t bytes = count * sizeof(T);
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t n = ::pread(fd_, reinterpret_cast<char*>(values.data()) + done, bytes - done,
                                static_cast<off_t>(offset_bytes + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("read " + path_, errno);
      if (n == 0) refuse(path_, "the file is shorter than its headers say");
      done += static_cast<std::size_t>(n);
    }
    return values;
  }

private:
  const std::string& path_;
  int fd_;
};

// What the headers of a shared library say.
struct Layout {
  std::vector<Phdr> segments;           // PT_LOAD
  std::size_t loaded_bytes = 0;         // of the file, up to the end of the last segment
  std::size_t soname_offset_bytes = 0;  // 0: none
  std::vector<Hole> gpu_code;           // whole pages
};

Layout read_layout(const std::string& path, int fd) {
  const Reader reader(path, fd);
  const Ehdr header = reader.read<Ehdr>(0, 1).front();
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_type != ET_DYN ||
      header.e_ident[EI_CLASS] != (sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32) || header.e_phentsize != sizeof(Phdr))
    refuse(path, "it is no shared library of this machine");
  Layout layout;
  const auto file_offset = [&](std::size_t address) -> std::size_t {
    for (const Phdr& segment : layout.segments)
      if (address >= segment.p_vaddr && address < segment.p_vaddr + segment.p_filesz)
        return address - segment.p_vaddr + segment.p_offset;
    refuse(path, "its dynamic section names an address that no segment has");
  };
  std::optional<Phdr> dynamic;
  for (const Phdr& segment : reader.read<Phdr>(header.e_phoff, header.e_phnum)) {
    if (segment.p_type == PT_DYNAMIC) dynamic = segment;
    if (segment.p_type != PT_LOAD) continue;
    layout.segments.push_back(segment);
    layout.loaded_bytes = std::max<std::size_t>(layout.loaded_bytes, segment.p_offset + segment.p_filesz);
  }
  if (!dynamic) refuse(path, "it has no dynamic section");
  std::optional<std::size_t> strings, soname;
  for (const auto& entry : reader.read<ElfW(Dyn)>(dynamic->p_offset, dynamic->p_filesz / sizeof(ElfW(Dyn)))) {
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag == DT_STRTAB) strings = entry.d_un.d_ptr;
    if (entry.d_tag == DT_SONAME) soname = entry.d_un.d_val;
  }
  if (strings && soname) layout.soname_offset_bytes = file_offset(*strings + *soname);

  if (header.e_shnum == 0 || header.e_shentsize != sizeof(Shdr)) return layout;  // stripped of section headers
  const auto sections = reader.read<Shdr>(header.e_shoff, header.e_shnum);
  if (header.e_shstrndx >= sections.size()) return layout;
  auto names = reader.read<char>(sections[header.e_shstrndx].sh_offset, sections[header.e_shstrndx].sh_size);
  names.push_back('\0');
  const std::size_t page = page_bytes();
  for (const Shdr& section : sections) {
    const char* name = section.sh_name < names.size() ? names.data() + section.sh_name : "";
    const bool is_gpu_code = std::any_of(std::begin(gpu_sections), std::end(gpu_sections),
                                         [&](const char* known) { return name == std::string(known); });
    if (!is_gpu_code || section.sh_type == SHT_NOBITS) continue;
    const std::size_t begin = (section.sh_offset + page - 1) / page * page;
    const std::size_t end = (section.sh_offset + section.sh_size) / page * page;
    for (const Phdr& segment : layout.segments) {
      const bool is_inside = section.sh_offset >= segment.p_offset &&
                             section.sh_offset + section.sh_size <= segment.p_offset + segment.p_filesz;
      // The loader may write into a writable segment, and only a fitting offset can be mapped.
      if (!is_inside || (segment.p_flags & PF_W) || (segment.p_vaddr - segment.p_offset) % page != 0 || end <= begin)
        continue;
      const int protection = PROT_READ | (segment.p_flags & PF_X ? PROT_EXEC : 0);
      layout.gpu_code.push_back(
          {static_cast<off_t>(begin), end - begin, begin - segment.p_offset + segment.p_vaddr, protection});
    }
  }
  std::sort(layout.gpu_code.begin(), layout.gpu_code.end(),
            [](const Hole& a, const Hole& b) { return a.offset_bytes < b.offset_bytes; });
  return layout;
}

void write_all(int fd, const char* data, std::size_t bytes, std::size_t offset_bytes, const std::string& what) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = ::pwrite(fd, data + done, bytes - done, static_cast<off_t>(offset_bytes + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("write " + what, errno);
    done += static_cast<std::size_t>(n);
  }
}

void copy_range(const Reader& reader, int to, std::size_t begin, std::size_t end, const std::string& what) {
  constexpr std::size_t piece_bytes = 1024 * 1024;
  for (std::size_t at = begin; at < end; at += piece_bytes) {
    const auto piece = reader.read<char>(at, std::min(piece_bytes, end - at));
    write_all(to, piece.data(), piece.size(), at, what);
  }
}

// "libnccl.so.2" becomes "hlmnccl.so.2": whoever needs the former is not given this one.
void change_soname(int fd, const Layout& layout, const std::string& what) {
  if (layout.soname_offset_bytes != 0) write_all(fd, "hlm", 3, layout.soname_offset_bytes, what);
}

// The file ends before the section headers, which only debuggers and symbolizers read: they must not look for them
// there.
void forget_sections(int fd, const std::string& original, const std::string& what) {
  Ehdr header = Reader(original, fd).read<Ehdr>(0, 1).front();
  header.e_shoff = 0;
  header.e_shnum = header.e_shstrndx = 0;
  write_all(fd, reinterpret_cast<const char*>(&header), sizeof(header), 0, what);
}

}  // namespace

ImageFile make_sparse_image(const std::string& original, int original_fd) {
  const Layout layout = read_layout(original, original_fd);
  const Reader reader(original, original_fd);
  const std::string what = "an NCCL image in memory";
  ImageFile image{UniqueFd(::memfd_create("holmes-nccl", MFD_CLOEXEC)), "sparse", layout.gpu_code, ""};
  if (!image.fd) fail("make " + what, errno);
  if (::ftruncate(image.fd.get(), static_cast<off_t>(layout.loaded_bytes)) != 0) fail("make " + what, errno);
  std::size_t at = 0;
  for (const Hole& hole : layout.gpu_code) {
    copy_range(reader, image.fd.get(), at, static_cast<std::size_t>(hole.offset_bytes), what);
    at = static_cast<std::size_t>(hole.offset_bytes) + hole.bytes;
  }
  copy_range(reader, image.fd.get(), at, layout.loaded_bytes, what);
  change_soname(image.fd.get(), layout, what);
  forget_sections(image.fd.get(), original, what);
  return image;
}

ImageFile make_copied_image(const std::string& original, int original_fd, const std::vector<std::string>& folders) {
  const Layout layout = read_layout(original, original_fd);
  struct stat status{};
  if (::fstat(original_fd, &status) != 0) fail("look at " + original, errno);
  std::string tried;
  int last_errno = ENOENT;
  const auto note = [&](const std::string& folder) {
    last_errno = errno;
    add_word(tried, folder + " (" + errno_text(last_errno) + ")");
  };
  for (const std::string& folder : folders) {
    UniqueFd fd(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0700));
    if (!fd) {
      note(folder);
      continue;
    }
    bool is_whole = ::ioctl(fd.get(), FICLONE, original_fd) == 0;
    if (!is_whole) {
      off_t from = 0;
      while (from < status.st_size) {
        const ssize_t n = ::sendfile(fd.get(), original_fd, &from, static_cast<std::size_t>(status.st_size - from));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
      }
      is_whole = from == status.st_size;
    }
    if (!is_whole) {
      note(folder);
      continue;
    }
    change_soname(fd.get(), layout, "a copy of " + original);
    return {std::move(fd), "copy", {}, folder};
  }
  throw SystemError("no folder takes a copy of " + original + ": " + tried +
                        "; name one on this node's disk with HOLMES_NCCL_IMAGE_FOLDER (" +
                        std::to_string(status.st_size / (1024 * 1024)) + " MiB, not mounted noexec)",
                    {.system_errno = last_errno});
}

}  // namespace holmes::nccl
