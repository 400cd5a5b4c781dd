#include "device_trace.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>

#include "fake_cuda.hpp"

namespace {

// A line is one call of the system: whoever reads the file meanwhile sees whole lines, also where the process is
// killed.
class File {
public:
  File() {
    const char* folder = std::getenv("FAKE_CUDA_TRACE");
    if (folder == nullptr) return;
    const std::string path = std::string(folder) + "/" + std::to_string(::getpid()) + ".trace";
    descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (descriptor_ < 0) fake_cuda_misuse(("no trace can be written to " + path).c_str());
    write("multiprocessors " + std::to_string(fake_cuda_multiprocessors()));
  }
  bool is_open() const { return descriptor_ >= 0; }
  void write(std::string line) const {
    line += '\n';
    if (::write(descriptor_, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      fake_cuda_misuse("the trace cannot be written");
  }

private:
  int descriptor_ = -1;
};
const File& file() {
  static const auto* made = new File();
  return *made;
}

}  // namespace

bool fake_trace_is_on() { return file().is_open(); }

std::uint64_t fake_trace_add(const void* stream, int device, const std::string& what) {
  static std::atomic<std::uint64_t> last{0};
  if (!file().is_open()) return 0;
  const std::uint64_t number = ++last;
  file().write("+ " + std::to_string(number) + " " + std::to_string(device) + " " +
               std::to_string(reinterpret_cast<std::uintptr_t>(stream)) + " " + what);
  return number;
}

void fake_trace_mark(std::uint64_t number, char what, int ctas) {
  if (number == 0) return;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  file().write(std::string(1, what) + " " + std::to_string(number) + " " +
               std::to_string(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()) + " " +
               std::to_string(ctas));
}
