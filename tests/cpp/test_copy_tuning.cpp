// CmaVote: all ranks go the same way in every call, and the better one in most.
#include "holmes/transport/shm/copy_tuning.hpp"

#include <array>
#include <optional>
#include <random>

#include "check.hpp"

using namespace holmes;
using holmes::test::result;

namespace {

constexpr int operation = 1;
constexpr std::size_t bytes = 16 << 20;
constexpr int ranks = 3;

struct Times {
  double ring_s = 0;
  double cma_s = 0;
};

// Share of the calls that go by CMA. Ranks measure differently, and now and then one is interrupted.
double share_of_cma(const Times& times, const std::array<CmaUse, ranks>& use, int calls,
                    std::array<CmaVote, ranks>& votes) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> noise(0.9, 1.1);
  int shown = 0;
  for (int call = 0; call < calls; ++call) {
    const bool shows = votes[0].uses_cma(operation, bytes);
    shown += shows;
    std::optional<CmaVote::Costs> total;
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK(votes[rank].uses_cma(operation, bytes) == shows);
      // As it travels.
      const auto costs = CmaVote::Costs::from(votes[rank].costs(operation, bytes, use[rank]).word());
      total = total ? *total + costs : costs;
    }
    for (CmaVote& vote : votes) {
      const double interrupted = random() % 50 == 0 ? 10 : 1;
      vote.ended(operation, bytes, interrupted * noise(random) * (shows ? times.cma_s : times.ring_s), *total);
    }
  }
  return static_cast<double>(shown) / calls;
}

constexpr std::array<CmaUse, ranks> all_measure{CmaUse::measured, CmaUse::measured, CmaUse::measured};

void check_better_way() {
  std::array<CmaVote, ranks> votes;
  CHECK(share_of_cma({2e-3, 1e-3}, all_measure, 1000, votes) > 0.9);
  // It turns out otherwise later.
  share_of_cma({1e-3, 3e-3}, all_measure, 200, votes);
  const double share = share_of_cma({1e-3, 3e-3}, all_measure, 1000, votes);
  CHECK(share > 0 && share < 0.1);
}

void check_no_difference() {
  std::array<CmaVote, ranks> votes;
  CHECK(share_of_cma({1e-3, 1e-3}, all_measure, 1000, votes) > 0);
  CHECK(!votes[0].uses_cma(operation + 1, bytes));
}

void check_limits() {
  std::array<CmaVote, ranks> votes;
  CHECK(share_of_cma({2e-3, 1e-3}, {CmaUse::always, CmaUse::never, CmaUse::measured}, 200, votes) == 0);
  std::array<CmaVote, ranks> others;
  // But for the first call, before anybody has heard of the others.
  CHECK(share_of_cma({1e-3, 2e-3}, {CmaUse::measured, CmaUse::always, CmaUse::measured}, 200, others) == 0.995);
  CHECK(!CmaVote::concerns(1000, 2));
  CHECK(!CmaVote::concerns(bytes, 1));
  CHECK(CmaVote::concerns(bytes, 2));
}

}  // namespace

int main() {
  check_better_way();
  check_no_difference();
  check_limits();
  return result("test_copy_tuning");
}
