#include "holmes/nccl/image.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/nccl/image_file.hpp"
#include "holmes/nccl/loaded_elf.hpp"

namespace holmes::nccl {
namespace {

// getenv has no argument that says who asks, so that each image calls functions of its own: number i asks environment
// i.
std::array<std::atomic<ImageEnvironment*>, ImageEnvironment::capacity> environments{};

template <std::size_t i>
char* image_getenv(const char* name) {
  return environments[i].load(std::memory_order_acquire)->get(name);
}
template <std::size_t i>
int image_setenv(const char* name, const char* value, int overwrite) {
  return environments[i].load(std::memory_order_acquire)->set(name, value, overwrite != 0);
}
template <std::size_t i>
int image_unsetenv(const char* name) {
  return environments[i].load(std::memory_order_acquire)->unset(name);
}

struct Functions {
  ImageEnvironment::Getenv* get;
  ImageEnvironment::Setenv* set;
  ImageEnvironment::Unsetenv* unset;
};
constexpr auto functions = []<std::size_t... i>(std::index_sequence<i...>) {
  return std::array<Functions, sizeof...(i)>{Functions{image_getenv<i>, image_setenv<i>, image_unsetenv<i>}...};
}(std::make_index_sequence<ImageEnvironment::capacity>());

}  // namespace

ImageEnvironment& ImageEnvironment::make(Variables variables) {
  static std::atomic<std::size_t> next{0};
  const std::size_t number = next.fetch_add(1);
  if (number >= capacity)
    throw UsageError("this process already has " + std::to_string(capacity) +
                     " NCCL images, and no more are possible: use fewer different NIC selections");
  auto* environment = new ImageEnvironment(std::move(variables));
  environment->getenv_ = functions[number].get;
  environment->setenv_ = functions[number].set;
  environment->unsetenv_ = functions[number].unset;
  environments[number].store(environment, std::memory_order_release);
  return *environment;
}

char* ImageEnvironment::get(const char* name) {
  if (name == nullptr) return nullptr;
  if (const auto found = variables_.find(std::string_view(name)); found != variables_.end()) {
    answered_.fetch_add(1, std::memory_order_relaxed);
    return found->second ? const_cast<char*>(found->second->c_str()) : nullptr;
  }
  if (char* value = std::getenv(name)) return value;
  std::lock_guard lock(mutex_);
  const auto found = set_by_image_.find(std::string_view(name));
  return found == set_by_image_.end() ? nullptr : const_cast<char*>(found->second->c_str());
}

int ImageEnvironment::set(const char* name, const char* value, bool overwrite) {
  if (name == nullptr || *name == '\0' || value == nullptr) {
    errno = EINVAL;
    return -1;
  }
  std::lock_guard lock(mutex_);
  if (!overwrite && set_by_image_.contains(std::string_view(name))) return 0;
  set_by_image_[name] = &values_.emplace_back(value);
  return 0;
}

int ImageEnvironment::unset(const char* name) {
  std::lock_guard lock(mutex_);
  set_by_image_.erase(std::string(name == nullptr ? "" : name));
  return 0;
}

namespace {

link_map* map_of(void* handle) {
  link_map* map = nullptr;
  return ::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map : nullptr;
}

// The same bytes of the original where the file has holes.
void fill_holes(const link_map& map, const ImageFile& file, int original_fd) {
  for (const Hole& hole : file.holes) {
    void* const address = reinterpret_cast<void*>(map.l_addr + hole.address);
    if (::mmap(address, hole.bytes, hole.protection, MAP_FIXED | MAP_PRIVATE, original_fd, hole.offset_bytes) ==
        MAP_FAILED)
      throw SystemError("cannot map the GPU code of an NCCL image: " + errno_text(errno), {.system_errno = errno});
  }
}

struct Loaded {
  void* handle;
  link_map* map;
};

Loaded load(const ImageFile& file, const Library& library) {
  const std::string path = "/proc/self/fd/" + std::to_string(file.fd.get());
  // NODELETE: an NCCL that has been called has threads. Not DEEPBIND: it breaks with other allocators and sanitizers.
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    throw SystemError("cannot load a " + file.form + " of " + library.path +
                      (file.place.empty() ? "" : " in " + file.place) + ": " + (reason ? reason : "unknown reason"));
  }
  link_map* map = map_of(handle);
  if (map == nullptr || map == map_of(library.handle) || ::strcmp(map->l_name, path.c_str()) != 0)
    throw SystemError("the loader took a " + file.form + " of " + library.path + " for a library it already had");
  return {handle, map};
}

std::vector<std::string> copy_folders(const Env& env) {
  if (env.nccl_image_folder) return {*env.nccl_image_folder};
  std::vector<std::string> folders;
  if (const char* folder = std::getenv("TMPDIR"); folder != nullptr && *folder == '/') folders.emplace_back(folder);
  folders.insert(folders.end(), {"/var/tmp", "/tmp", "/dev/shm"});
  return folders;
}

}  // namespace

Image::Image(const Profile& profile, const Library& library, int number) : profile_(profile) {
  const UniqueFd original(::open(library.path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!original) throw SystemError("cannot open " + library.path + ": " + errno_text(errno), {.system_errno = errno});
  const Env env = Env::read();
  std::vector<std::function<ImageFile()>> ways;
  if (env.nccl_image == NcclImageForm::sparse)
    ways.emplace_back([&] { return make_sparse_image(library.path, original.get()); });
  // A folder at a time, as only loading shows whether one is mounted noexec.
  for (const std::string& folder : copy_folders(env))
    ways.emplace_back([&, folder] { return make_copied_image(library.path, original.get(), {folder}); });

  std::string tried;
  for (const auto& way : ways) {
    try {
      ImageFile file = way();
      const auto [handle, map] = load(file, library);
      static_cast<void>(file.fd.release());  // stays open, see ImageFile
      fill_holes(*map, file, original.get());
      LoadedElf elf(*map);
      elf.bind_own_symbols();
      environment_ = &ImageEnvironment::make(image_variables(profile));
      if (elf.redirect("getenv", reinterpret_cast<void*>(environment_->getenv_function())) == 0)
        throw UsageError(library.path + " does not ask the system for its environment (no getenv slot): its NICs " +
                         "cannot be chosen apart from the process's; name another libnccl with HOLMES_NCCL_LIBRARY");
      elf.redirect("setenv", reinterpret_cast<void*>(environment_->setenv_function()));
      elf.redirect("unsetenv", reinterpret_cast<void*>(environment_->unsetenv_function()));
      api_ = load_api(handle, library.path);
      text_ = file.form + " image " + std::to_string(number) + " of " + library.path;
      break;
    } catch (const SystemError& error) {
      tried += std::string("\n  ") + error.what();
    }
  }
  if (text_.empty())
    throw SystemError("no further NCCL image can be made for " + profile.text() + "; tried:" + tried +
                      "\nName a folder on this node's disk with HOLMES_NCCL_IMAGE_FOLDER, or use one NIC selection "
                      "for all NCCL communicators of this process");
  log(LogLevel::info, std::nullopt,
      "NCCL " + version_text(api_.version) + ", " + text_ + ": " + profile.text() +
          (tried.empty() ? "" : "; other forms failed:" + tried));
}

const Image& image_for(const Profile& profile, const Library& library) {
  static std::mutex mutex;
  static auto* const images = new std::map<std::string, std::unique_ptr<Image>>();  // never destroyed
  const std::string key = profile.key();
  std::lock_guard lock(mutex);
  auto& image = (*images)[key];
  if (image == nullptr) image.reset(new Image(profile, library, static_cast<int>(images->size())));
  return *image;
}

}  // namespace holmes::nccl
