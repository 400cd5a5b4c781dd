#include "bindings/held_object.hpp"

#include <Python.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace holmes {
namespace {

struct LetGo {
  std::mutex mutex;
  std::vector<std::pair<void*, void (*)(void*)>> objects;
  std::atomic<bool> any{false};
};

LetGo& let_go() {
  static auto* all = new LetGo();  // never destroyed: threads may outlive the end of main
  return *all;
}

int release_pending(void*) {
  release_let_go();
  return 0;
}

void release_or_leave(void* object, void (*release)(void*)) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    release(object);
    return;
  }
  LetGo& all = let_go();
  {
    std::lock_guard lock(all.mutex);
    all.objects.emplace_back(object, release);
    if (all.any.exchange(true)) return;  // somebody has asked already
  }
  // Where the interpreter's list is full, the next call of a binding releases them.
  if (Py_IsInitialized()) Py_AddPendingCall(release_pending, nullptr);
}

}  // namespace

std::shared_ptr<void> held_by_work(void* object, void (*release)(void*)) {
  release_let_go();
  return {object, [release](void* held) { release_or_leave(held, release); }};
}

void release_let_go() {
  LetGo& all = let_go();
  if (!all.any.load(std::memory_order_acquire)) return;
  std::vector<std::pair<void*, void (*)(void*)>> objects;
  {
    std::lock_guard lock(all.mutex);
    objects.swap(all.objects);
    all.any.store(false, std::memory_order_release);
  }
  for (const auto& [object, release] : objects) release(object);
}

}  // namespace holmes
