// CopyVote: all ranks go the same way in every call, and the best one in most. ChannelTuning: messages that go both
// ways at once, and those that do not, go the way that is better for them.
#include "holmes/transport/shm/copy_tuning.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <random>
#include <utility>

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

// A channel that sends messages, and what its peer measures as their receiver.
struct Sender {
  CmaRegion::Costs mine[CmaRegion::cost_count]{}, theirs[CmaRegion::cost_count]{};
  std::shared_ptr<MessageBytes> messages = std::make_shared<MessageBytes>();  // also of other peers
  ChannelTuning tuning{CmaUse::measured, mib, mine, theirs, messages};

  // Sends many of `bytes`, each in pieces of half a MiB, while so many bytes come at once, now and then; or between
  // messages. Returns whether large pieces are copied out of its memory then.
  bool ends_with_cma(std::size_t at_once, bool between) {
    static std::array<std::byte, bytes> message;
    constexpr std::size_t piece = mib / 2;
    for (int round = 0; round < 200; ++round) {
      for (std::size_t sent = 0; sent < bytes; sent += piece) {
        if (at_once > 0 && !between && (sent + piece) % at_once == 0) messages->received += at_once;
        const iovec part{message.data() + sent, bytes - sent};
        tuning.wrote(piece, static_cast<double>(piece) * 1e-10);
        tuning.offered(piece);
        tuning.sent({&part, 1}, piece);
      }
      if (between) messages->received += bytes;
    }
    return tuning.prefers_sender_memory() && tuning.uses_cma(mib);
  }
};

void check_both_ways() {
  const auto ends_with_cma = [](std::size_t at_once, bool between) {
    Sender sender;
    sender.theirs[0].ring = sender.theirs[1].cma = 1e-10f;  // one way at a time: a ring
    sender.theirs[0].cma = sender.theirs[1].ring = 4e-10f;
    return sender.ends_with_cma(at_once, between);
  };
  CHECK(!ends_with_cma(0, false));
  CHECK(!ends_with_cma(bytes, true));  // answers
  for (const std::size_t at_once : {1 << 19, 4 << 20, 16 << 20}) CHECK(ends_with_cma(at_once, false));
}

// It stays as it is where the other way is hardly better.
void check_kept() {
  Sender sender;
  sender.theirs[1].ring = 4e-10f;  // and 1e-10 to write into it
  for (const auto& [cma, is_better] : {std::pair(1e-10f, true), {5.4e-10f, true}, {7e-10f, false}, {5.4e-10f, false}}) {
    sender.theirs[1].cma = cma;
    CHECK(sender.ends_with_cma(bytes, false) == is_better);
  }
}

}  // namespace

int main() {
  check_both_ways();
  check_kept();
  check_better_way();
  check_no_difference();
  check_limits();
  check_shared();
  check_kinds_apart();
  check_shared_limits();
  check_refusal();
  return result("test_copy_tuning");
}
