#include "bindings/terminate.hpp"

#include <execinfo.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace holmes {
namespace {

std::terminate_handler previous = nullptr;

void print_exception() {
  const std::exception_ptr error = std::current_exception();
  if (!error) {
    std::fputs("no exception", stderr);
    return;
  }
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    std::fputs(known.what(), stderr);
  } catch (...) {  // a thread's forced end would not be let through either
    std::fputs("an exception of no known class", stderr);
  }
}

[[noreturn]] void report() {
  std::array<char, 16> name{};
  ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  std::fprintf(stderr, "holmes: std::terminate in thread '%s' (", name.data());
  print_exception();
  std::fputs("); its stack:\n", stderr);
  std::fflush(stderr);
  std::array<void*, 64> frames;
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), static_cast<int>(frames.size())), STDERR_FILENO);
  if (previous) previous();
  std::abort();
}

}  // namespace

void report_terminate() {
  if (!previous) previous = std::set_terminate(&report);
}

}  // namespace holmes
