// CopyVote: all ranks go the same way in every call, and the best one in most. CallTuning and ChannelTuning: so do what
// one channel is given, by size.
#include "holmes/transport/shm/copy_tuning.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "check.hpp"

using namespace holmes;
using holmes::test::result;

namespace {

constexpr int operation = 1;
constexpr std::size_t bytes = 16 << 20;
constexpr int ranks = 3;

using Votes = std::array<CopyVote, ranks>;
using Shares = std::array<double, copy_way_count>;

struct Times {
  double ring_s = 0;
  double cma_s = 0;
  double in_place_s = 0;
  double of(CopyWay way) const { return std::array{ring_s, cma_s, in_place_s}[static_cast<std::size_t>(way)]; }
};

constexpr CopyVote::Abilities measuring{CmaUse::measured, true};
constexpr std::array<CopyVote::Abilities, ranks> all_measure{measuring, measuring, measuring};

std::array<CopyVote::Abilities, ranks> with_cma(CmaUse first, CmaUse second, CmaUse third) {
  return {{{first, true}, {second, true}, {third, true}}};
}

// Share of the calls that go each way. Ranks measure differently, and now and then one is interrupted.
Shares shares(const Times& times, const std::array<CopyVote::Abilities, ranks>& abilities, int calls, Votes& votes,
              CopyVote::Memory memory) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> noise(0.9, 1.1);
  std::array<int, copy_way_count> taken{};
  for (int call = 0; call < calls; ++call) {
    const CopyWay way = votes[0].way(operation, bytes, memory);
    ++taken[static_cast<std::size_t>(way)];
    std::optional<CopyVote::Costs> total;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      CHECK(votes[rank].way(operation, bytes, memory) == way);
      const auto costs =
          votes[rank].ballot(operation, bytes, memory == CopyVote::shared, abilities[rank]).costs(memory);
      total = total ? *total + costs : costs;
    }
    for (CopyVote& vote : votes) {
      const double interrupted = random() % 50 == 0 ? 10 : 1;
      vote.ended(operation, bytes, memory, interrupted * noise(random) * times.of(way), *total);
    }
  }
  Shares shares{};
  std::ranges::transform(taken, shares.begin(), [&](int count) { return static_cast<double>(count) / calls; });
  return shares;
}

double share_of_cma(const Times& times, const std::array<CopyVote::Abilities, ranks>& abilities, int calls,
                    Votes& votes) {
  const Shares taken = shares(times, abilities, calls, votes, CopyVote::ordinary);
  CHECK(taken[2] == 0);
  return taken[1];
}

void check_better_way() {
  Votes votes;
  CHECK(share_of_cma({2e-3, 1e-3}, all_measure, 1000, votes) > 0.9);
  // It turns out otherwise later.
  share_of_cma({1e-3, 3e-3}, all_measure, 200, votes);
  const double share = share_of_cma({1e-3, 3e-3}, all_measure, 1000, votes);
  CHECK(share > 0 && share < 0.1);
}

void check_no_difference() {
  Votes votes;
  CHECK(share_of_cma({1e-3, 1e-3}, all_measure, 1000, votes) > 0);
  CHECK(votes[0].way(operation + 1, bytes, CopyVote::ordinary) == CopyWay::ring);
}

void check_limits() {
  Votes votes;
  CHECK(share_of_cma({2e-3, 1e-3}, with_cma(CmaUse::always, CmaUse::never, CmaUse::measured), 200, votes) == 0);
  Votes others;
  // But for the first call, before anybody has heard of the others.
  const auto one_must = with_cma(CmaUse::measured, CmaUse::always, CmaUse::measured);
  CHECK(share_of_cma({1e-3, 2e-3}, one_must, 200, others) == 0.995);
  CHECK(!CopyVote::concerns(1000, 2));
  CHECK(!CopyVote::concerns(bytes, 1));
  CHECK(CopyVote::concerns(bytes, 2));
}

// Each of the three ways is taken where it is the best, whatever came before.
void check_shared() {
  Votes votes;
  for (int round = 0; round < 2; ++round)
    for (std::size_t best : {0, 1, 2, 1, 0, 2}) {
      std::array<double, copy_way_count> times{3e-3, 3e-3, 3e-3};
      times[best] = 2e-3;
      const Times all{times[0], times[1], times[2]};
      shares(all, all_measure, 600, votes, CopyVote::shared);
      const Shares taken = shares(all, all_measure, 1280, votes, CopyVote::shared);
      CHECK(taken[best] > 0.9);
      CHECK(*std::ranges::min_element(taken) > 0.005);  // what it costs by now is learned
    }
}

// What is known of the one kind of memory says nothing of the other.
void check_kinds_apart() {
  Votes votes;
  const Times times{2e-3, 1e-3, 0.5e-3};
  for (int round = 0; round < 300; ++round) {
    shares(times, all_measure, 1, votes, CopyVote::shared);
    shares(times, all_measure, 1, votes, CopyVote::ordinary);
  }
  CHECK(shares(times, all_measure, 1280, votes, CopyVote::shared)[2] > 0.9);
  CHECK(share_of_cma(times, all_measure, 1280, votes) > 0.9);
}

void check_shared_limits() {
  const Times times{2e-3, 3e-3, 1e-3};
  auto one_cannot = all_measure;
  one_cannot[1].in_place = false;
  Votes votes;
  CHECK(shares(times, one_cannot, 300, votes, CopyVote::shared)[2] == 0);
  Votes others;
  const auto one_must = with_cma(CmaUse::measured, CmaUse::always, CmaUse::measured);
  CHECK(shares(times, one_must, 200, others, CopyVote::shared)[2] == 0.995);
  // Without CMA (yama, say) there is in place still.
  Votes without;
  const auto none = with_cma(CmaUse::never, CmaUse::never, CmaUse::never);
  const Shares taken = shares(times, none, 1000, without, CopyVote::shared);
  CHECK(taken[2] > 0.9 && taken[1] == 0);
}

// Where one rank's peer could not read its buffer, all of them leave it, and try again much later.
void check_refusal() {
  const Times times{2e-3, 3e-3, 1e-3};
  Votes votes;
  CHECK(shares(times, all_measure, 200, votes, CopyVote::shared)[2] > 0.9);
  votes[1].was_refused_in_place();
  shares(times, all_measure, 1, votes, CopyVote::shared);  // in which they hear of it
  CHECK(shares(times, all_measure, 900, votes, CopyVote::shared)[2] == 0);
  shares(times, all_measure, 200, votes, CopyVote::shared);
  CHECK(shares(times, all_measure, 1000, votes, CopyVote::shared)[2] > 0.9);
}

constexpr std::size_t mib = 1 << 20;

// Share of the calls of `call_bytes` that go by CMA; now and then a rank is interrupted, where the times are noisy.
double share_of_cma(CallTuning& tuning, std::size_t call_bytes, const Times& times, int calls, bool is_noisy = true) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> noise(is_noisy ? 0.9 : 1.0, is_noisy ? 1.1 : 1.0);
  int by_cma = 0;
  for (int call = 0; call < calls; ++call) {
    const CopyWay way = tuning.way(call_bytes);
    by_cma += way == CopyWay::cma;
    const double interrupted = is_noisy && random() % 50 == 0 ? 10 : 1;
    tuning.ended(call_bytes, interrupted * noise(random) * times.of(way));
  }
  return static_cast<double>(by_cma) / calls;
}

// Sizes are apart: what fits the caches goes another way than what does not, on the same channel.
void check_calls() {
  CallTuning tuning;
  CHECK(tuning.way(mib) == CopyWay::ring);  // nothing is known
  for (int round = 0; round < 3; ++round) {
    CHECK(share_of_cma(tuning, mib, {1e-4, 2e-4}, 300) < 0.1);
    CHECK(share_of_cma(tuning, 64 * mib, {13e-3, 9e-3}, 300) > 0.9);
  }
  share_of_cma(tuning, mib, {3e-4, 1e-4}, 200);  // it turns out otherwise
  const double share = share_of_cma(tuning, mib, {3e-4, 1e-4}, 1000);
  CHECK(share > 0.9 && share < 1);
}

// Of a size that was never sent, what is known of the next smaller one holds.
void check_new_size() {
  CallTuning tuning;
  share_of_cma(tuning, mib, {1e-4, 2e-4}, 300);
  share_of_cma(tuning, 16 * mib, {3e-3, 2e-3}, 300);
  CHECK(tuning.way(64 * mib) == CopyWay::cma && tuning.way(4 * mib) == CopyWay::ring);
  CHECK(share_of_cma(tuning, 64 * mib, {13e-3, 9e-3}, 4) == 1);
  Votes votes;
  share_of_cma({2e-3, 1e-3}, all_measure, 300, votes);
  CHECK(votes[0].way(operation, 4 * bytes, CopyVote::ordinary) == CopyWay::cma);
  CHECK(votes[0].way(operation, bytes / 4, CopyVote::ordinary) == CopyWay::ring);
  CHECK(votes[0].way(operation + 1, 4 * bytes, CopyVote::ordinary) == CopyWay::ring);
  CHECK(votes[0].way(operation, 4 * bytes, CopyVote::shared) != CopyWay::cma);
}

// The longer nothing changes, the less is spent on trials, and least where one way is much better.
void check_few_trials() {
  CallTuning tuning;
  CHECK(share_of_cma(tuning, mib, {1e-4, 1.4e-4}, 64) > 0.04);
  share_of_cma(tuning, mib, {1e-4, 1.4e-4}, 192);
  const double share = share_of_cma(tuning, mib, {1e-4, 1.4e-4}, 2560);
  CHECK(share > 0.01 && share < 0.02);
  share_of_cma(tuning, mib, {1e-4, 2e-4}, 1024);
  const double least = share_of_cma(tuning, mib, {1e-4, 2e-4}, 10240);
  CHECK(least > 0.003 && least < 0.005);
  // Once it is less clear, they are more again; and where it turns, that is found.
  share_of_cma(tuning, mib, {1e-4, 1.4e-4}, 2048);
  CHECK(share_of_cma(tuning, mib, {1e-4, 1.4e-4}, 2560) > 0.01);
  share_of_cma(tuning, mib, {1e-4, 2e-4}, 2048);
  share_of_cma(tuning, mib, {1e-4, 0.8e-4}, 1024);
  CHECK(share_of_cma(tuning, mib, {1e-4, 0.8e-4}, 2560) > 0.95);
  Votes votes;
  share_of_cma({1e-3, 2e-3}, all_measure, 1024, votes);
  const double of_votes = share_of_cma({1e-3, 2e-3}, all_measure, 10240, votes);
  CHECK(of_votes > 0.003 && of_votes < 0.005);
}

// Where ranks share processors, by what this rank waits for meanwhile.
void check_shared_processors() {
  static std::array<std::byte, 8 * mib> message;
  const auto messages = std::make_shared<MessageBytes>();
  messages->ring_calls = {4 * mib, mib / 2};
  ChannelTuning tuning(CmaUse::measured, messages);
  const auto goes_by_cma = [&](std::size_t call_bytes, bool receives) {
    tuning.set_receives_meanwhile(receives);
    const iovec whole{message.data(), call_bytes};
    tuning.offer({&whole, 1});
    const bool uses_cma = tuning.uses_cma(call_bytes);
    if (tuning.sent({&whole, 1}, call_bytes)) tuning.end_call(0);
    return uses_cma;
  };
  for (int round = 0; round < 3; ++round) {
    CHECK(!goes_by_cma(4 * mib, false) && goes_by_cma(8 * mib, false));
    CHECK(!goes_by_cma(mib / 2, true) && goes_by_cma(mib, true) && goes_by_cma(4 * mib, true));
  }
}

// From what is interrupted, such as a region that nobody came for, nothing is learned; least of all that it is fast.
void check_spoiled_calls() {
  CallTuning all_spoiled, some_spoiled;
  int by_cma = 0;
  for (int call = 0; call < 1000; ++call) {
    const CopyWay way = some_spoiled.way(mib);
    by_cma += (way == CopyWay::cma) + (all_spoiled.way(mib) == CopyWay::cma);
    all_spoiled.ended(mib, std::nullopt);
    some_spoiled.ended(mib, way == CopyWay::cma && call % 4 < 2 ? std::nullopt : std::optional(1e-3));
  }
  CHECK(by_cma > 0 && by_cma < 200);
}

// The first calls, whose memory is new, say nothing.
void check_slow_begin() {
  CallTuning tuning;
  for (int call = 0; call < 4; ++call) {
    CHECK(tuning.way(mib) == CopyWay::ring);
    tuning.ended(mib, 1e-2);
  }
  CHECK(share_of_cma(tuning, mib, {1e-4, 2e-4}, 100) < 0.1);
}

// It stays as it is where the other way is hardly better.
void check_kept() {
  CallTuning tuning;
  const double ring_s = 5e-4;
  for (const auto& [cma_s, is_better] : {std::pair(1e-4, true), {5.2e-4, true}, {7e-4, false}, {4.9e-4, false}}) {
    share_of_cma(tuning, mib, {ring_s, cma_s}, 300, false);
    CHECK((share_of_cma(tuning, mib, {ring_s, cma_s}, 1000, false) > 0.5) == is_better);
  }
}

// What is too short, or not wanted, goes through the ring whatever was measured.
void check_pieces() {
  std::vector<std::byte> memory(mib);
  const iovec whole{memory.data(), mib};
  const iovec part{memory.data(), min_cma_bytes - 1};
  ChannelTuning always(CmaUse::always, nullptr);
  always.offer({&whole, 1});
  CHECK(always.uses_cma(mib) && always.prefers_sender_memory());
  CHECK(!always.uses_cma(min_cma_bytes - 1));
  always.set(CopyWay::ring);
  CHECK(!always.uses_cma(mib) && !always.prefers_sender_memory());
  always.set(std::nullopt);
  always.give_up();
  always.offer({&whole, 1});
  CHECK(!always.uses_cma(mib));
  ChannelTuning never(CmaUse::never, nullptr);
  never.set(CopyWay::cma);
  CHECK(!never.uses_cma(mib));
  // Trials are of whole calls, however they are taken: the way is the same for all of one.
  ChannelTuning measured(CmaUse::measured, nullptr);
  int by_cma = 0;
  for (int call = 0; call < 200; ++call) {
    measured.offer({&whole, 1});
    const bool uses_cma = measured.uses_cma(mib);
    by_cma += uses_cma;
    for (std::size_t sent = 0; sent < mib; sent += mib / 4) {
      const iovec rest{memory.data() + sent, mib - sent};
      measured.offer({&rest, 1});
      CHECK(measured.uses_cma(mib) == uses_cma);
      const bool ends = measured.sent({&rest, 1}, mib / 4);
      CHECK(ends == (sent + mib / 4 == mib));
      if (ends) measured.end_call(mib / 8);
    }
    measured.offer({&part, 1});
    CHECK(!measured.sent({&part, 1}, part.iov_len));
  }
  CHECK(by_cma > 0);
}

// Bytes that come while a message goes make it one of both ways; answers do not.
void check_one_way() {
  static std::array<std::byte, bytes> message;
  const auto is_one_way = [](std::size_t at_once, bool between) {
    const auto messages = std::make_shared<MessageBytes>();
    ChannelTuning tuning(CmaUse::measured, messages);
    constexpr std::size_t piece = mib / 2;
    for (int round = 0; round < 20; ++round) {
      for (std::size_t sent = 0; sent < bytes; sent += piece) {
        if (at_once > 0 && !between && (sent + piece) % at_once == 0) tuning.received(at_once);
        const iovec part{message.data() + sent, bytes - sent};
        tuning.sent({&part, 1}, piece);
      }
      if (between) tuning.received(bytes);
    }
    return tuning.is_one_way();
  };
  CHECK(is_one_way(0, false));
  CHECK(is_one_way(bytes, true));
  for (const std::size_t at_once : {1 << 19, 4 << 20, 16 << 20}) CHECK(!is_one_way(at_once, false));
  CHECK(!ChannelTuning(CmaUse::measured, nullptr).is_one_way());
}

void check_cost() {
  CopyCost cost;
  cost.add(1e-9, 0.2);
  cost.add(1e-3, 0.2);  // interrupted
  CHECK(cost.s_per_byte() < 1.3e-9f);
}

}  // namespace

int main() {
  check_calls();
  check_new_size();
  check_few_trials();
  check_shared_processors();
  check_spoiled_calls();
  check_slow_begin();
  check_kept();
  check_pieces();
  check_one_way();
  check_cost();
  check_better_way();
  check_no_difference();
  check_limits();
  check_shared();
  check_kinds_apart();
  check_shared_limits();
  check_refusal();
  return result("test_copy_tuning");
}
