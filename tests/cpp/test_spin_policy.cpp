// SpinPolicy: a wait polls in a rush at first, where that has been enough lately.
#include "holmes/engine/spin_policy.hpp"

#include "check.hpp"

using namespace holmes;
using holmes::test::result;

namespace {

constexpr auto spin = std::chrono::seconds(10);

// One wait, that ends after so many polls.
bool rushes(SpinPolicy& policy, int polls) {
  auto wait = policy.begin(/*may_rush=*/true);
  for (int i = 0; i < polls; ++i) CHECK(wait.goes_on());
  CHECK(wait.has_begun() == (polls > 0));
  policy.succeeded(wait);
  return wait.rushes();
}

void check_rushes() {
  SpinPolicy policy(spin);
  for (int i = 0; i < 100; ++i) CHECK(rushes(policy, 5));
  int rushed = 0;
  for (int i = 0; i < 1000; ++i) rushed += rushes(policy, 100);  // as where the peer needs this processor
  CHECK(rushed < 40);
  for (int i = 0; i < 1000; ++i) rushes(policy, 5);
  CHECK(rushes(policy, 5));  // the peer has one of its own again
}

void check_none() {
  SpinPolicy never(Duration::zero());
  auto wait = never.begin(/*may_rush=*/true);
  CHECK(!wait.goes_on());
  CHECK(!wait.has_begun());
  SpinPolicy policy(spin);
  CHECK(!policy.begin(/*may_rush=*/false).rushes());
}

}  // namespace

int main() {
  check_rushes();
  check_none();
  return result("test_spin_policy");
}
