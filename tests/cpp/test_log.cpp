// What strangers can make a process write: a bounded number of lines a minute. And bytes that are no text, in messages.
#include <fcntl.h>
#include <unistd.h>

#include <functional>
#include <thread>
#include <vector>

#include "check.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/text.hpp"

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

void test_bytes_that_are_no_text_are_shown() {
  for (const std::string text :
       {"", "eth0", "\xc3\xb6", "\xe2\x82\xac", "\xed\x9f\xbf", "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    CHECK(readable(text) == text);
  const std::pair<std::string, std::string> shown[] = {
      {"a\xff"
       "b",
       "a\\xffb"},
      {"\xc3", "\\xc3"},  // ends too early
      {"\xe2\x82", "\\xe2\\x82"},
      {"\xc3\xc3\xb6", "\\xc3\xc3\xb6"},  // and what follows is text
      {"\xb6", "\\xb6"},                  // begins in the middle
      {"\xc0\xaf", "\\xc0\\xaf"},         // not the shortest form
      {"\xe0\x9f\xbf", "\\xe0\\x9f\\xbf"},
      {"\xf0\x8f\xbf\xbf", "\\xf0\\x8f\\xbf\\xbf"},
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // a surrogate
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // beyond the last character
      {"\xf8\x88\x80\x80\x80", "\\xf8\\x88\\x80\\x80\\x80"},
  };
  for (const auto& [text, wanted] : shown) {
    CHECK(readable(text) == wanted);
    CHECK(message_of<UsageError>([&] { throw UsageError(text); }) == wanted);
  }
}

}  // namespace

int main() {
  test_a_flood_of_strangers();
  test_bytes_that_are_no_text_are_shown();
  return test::result("test_log");
}
