#include "kernels/interface.hpp"
#include "kernels/launch.hpp"

namespace holmes::kernels {
namespace {

thread_local std::string last_error;

}  // namespace

int fail(cudaError_t code, const std::string& reason) {
  last_error = reason;
  return code;
}

}  // namespace holmes::kernels

extern "C" HOLMES_API const char* holmes_cuda_last_error() { return holmes::kernels::last_error.c_str(); }
