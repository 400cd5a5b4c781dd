// Work: who waits and what follows hear of the end, whatever one of them does.
#include "holmes/core/work.hpp"

#include <stdexcept>

#include "check.hpp"
#include "holmes/core/error.hpp"

using namespace holmes;
using namespace holmes::test;

int main() {
  for (const bool fails : {false, true}) {
    Work work;
    int heard = 0;
    work.on_final([&] { ++heard; });
    work.on_final([] { throw std::runtime_error("no more memory"); });
    work.on_final([&] { ++heard; });
    CHECK(heard == 0);
    if (fails) {
      work.fail(std::make_exception_ptr(AbortedError("aborted")));
    } else {
      work.complete();
    }
    CHECK(heard == 2);
    CHECK(work.is_final());
    CHECK(name(work.state()) == (fails ? "failed" : "completed"));
    work.on_final([&] { ++heard; });
    CHECK(heard == 3);
  }
  return result("test_work");
}
