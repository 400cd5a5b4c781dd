// What the C++ tests need: checks that say where and what, and errors that must come.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "holmes/core/error.hpp"

#ifdef __SANITIZE_THREAD__
// One error fails several works, and the last thread that lets go of it destroys it. What orders that after the others'
// reading is its count of references, which lies in libstdc++, where the sanitizer does not look.
extern "C" [[gnu::used]] inline const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
#endif

namespace holmes::test {

inline std::atomic<int> failures{0};
// Also where main does not return result().
inline const int failures_are_told = std::atexit([] {
  if (failures != 0) std::_Exit(1);
});

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      ++::holmes::test::failures;                                                        \
    }                                                                                    \
  } while (false)

// Runs `call`, which must throw an `Error`; returns its message.
template <class Error, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "wrong type of error: %s\n", error.what());
    ++failures;
    return error.what();
  }
  std::fprintf(stderr, "no error where one is due\n");
  ++failures;
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "'%s' is not in '%s'\n", part.c_str(), text.c_str());
  return found;
}

inline int result(const char* name) {
  std::printf("%s: %s\n", name, failures == 0 ? "all checks passed" : "FAILED");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace holmes::test
