// What strangers can make a process write: a bounded number of lines a minute.
#include <fcntl.h>
#include <unistd.h>

#include <functional>
#include <thread>
#include <vector>

#include "check.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/log.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

// What `call` writes to stderr.
std::vector<std::string> lines_of(const std::function<void()>& call) {
  char name[] = "/tmp/holmes-test-log-XXXXXX";
  const int file = ::mkstemp(name);
  ::unlink(name);
  const int saved = ::dup(STDERR_FILENO);
  ::dup2(file, STDERR_FILENO);
  call();
  ::dup2(saved, STDERR_FILENO);
  ::close(saved);
  std::vector<std::string> lines(1);
  char buffer[4096];
  ::lseek(file, 0, SEEK_SET);
  for (ssize_t got = 0; (got = ::read(file, buffer, sizeof buffer)) > 0;)
    for (ssize_t i = 0; i < got; ++i) {
      if (buffer[i] == '\n')
        lines.emplace_back();
      else
        lines.back() += buffer[i];
    }
  ::close(file);
  lines.pop_back();  // behind the last newline
  return lines;
}

void test_a_flood_of_strangers() {
  const auto lines = lines_of([] {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread)
      threads.emplace_back([] {
        for (int i = 0; i < 100; ++i) log_of_stranger(3, "dropped a connection from unix: Broken pipe");
      });
    for (auto& thread : threads) thread.join();
  });
  CHECK(lines.size() == 20);
  int last = 0;
  for (const auto& line : lines) last += line.ends_with("further ones of this minute are logged at level debug");
  CHECK(last == 1);
}

}  // namespace

int main() {
  test_a_flood_of_strangers();
  return test::result("test_log");
}
