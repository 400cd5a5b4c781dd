// Preloaded: between arm and disarm no allocation of C++ succeeds, but on the threads that are spared.
#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<bool> is_armed{false};
thread_local bool is_spared = false;

}  // namespace

extern "C" void failing_new_spare_this_thread() { is_spared = true; }
extern "C" void failing_new_arm(bool armed) { is_armed = armed; }

void* operator new(std::size_t bytes) {
  void* memory = is_armed && !is_spared ? nullptr : std::malloc(bytes ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
