#include "holmes/bootstrap/store_exchange.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <span>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/bootstrap/secret.hpp"
#include "holmes/core/fields.hpp"
#include "holmes/core/options.hpp"
#include "holmes/record/registry.hpp"
#include "holmes/record/watcher.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

// A rank that waits for others to come, as `holmes debug` sees it: a communicator whose set-up is not done.
class WaitingRank final : public RecordSource {
public:
  explicit WaitingRank(const Meeting& meeting) {
    record_.name = meeting.key;
    while (record_.name.ends_with("/nics")) record_.name.resize(record_.name.size() - 5);  // of the group's meeting
    record_.backend = "host";
    record_.rank = meeting.rank;
    record_.size = meeting.size;
  }

  void request_state() override {}
  CommunicatorRecord record(Clock::time_point) override { return record_; }
  CommunicatorMetrics metrics() override { return {}; }

private:
  CommunicatorRecord record_;
};

std::shared_ptr<WaitingRank> show_waiting(const Meeting& meeting) {
  auto waiting = std::make_shared<WaitingRank>(meeting);
  start_watcher(Env::read());
  register_source(waiting);
  return waiting;
}

// Of the tree: so many ranks, or blocks, are one block of the next level.
constexpr int fan = 16;

// Ranks that follow each other. The first one leads them: what they bring goes through it, and what they are told.
struct Block {
  int first = 0;
  int level = 0;  // of fan^level ranks, fewer at the end
};

int end_of(const Meeting& meeting, const Block& block) {
  std::int64_t width = 1;
  for (int level = 0; level < block.level; ++level) width *= fan;
  return static_cast<int>(std::min<std::int64_t>(block.first + width, meeting.size));
}

std::size_t count_of(const Meeting& meeting, const Block& block) {
  return static_cast<std::size_t>(end_of(meeting, block) - block.first);
}

// The largest block that this rank leads, of level 0 where that is itself.
Block block_of(const Meeting& meeting) {
  Block block{meeting.rank, 0};
  for (std::int64_t width = 1; width < meeting.size && meeting.rank % (width * fan) == 0; width *= fan) ++block.level;
  return block;
}

// What it is made of, beside its first rank, in order.
std::vector<Block> parts_of(const Meeting& meeting, const Block& block) {
  std::vector<Block> parts;
  for (int level = 0; level < block.level; ++level) {
    int first = end_of(meeting, {block.first, level});
    for (int i = 1; i < fan && first < meeting.size; ++i) {
      parts.push_back({first, level});
      first = end_of(meeting, parts.back());
    }
  }
  return parts;
}

std::string key_of(const Meeting& meeting, int rank) { return meeting.key + "/" + std::to_string(rank); }

// Of what a block brings.
std::string key_of(const Meeting& meeting, const Block& block) {
  return key_of(meeting, block.first) + (block.level > 0 ? "/block" : "");
}

// Of what it is told.
std::string answer_key(const Meeting& meeting, const Block& block) {
  return meeting.key + "/answer/" + std::to_string(block.first) + "/" + std::to_string(block.level);
}

// Where a rank reads what it is told: with the ranks around it, or, leading more than those, with all of its block.
Block told_with(const Meeting& meeting) {
  const Block own = block_of(meeting);
  return own.level > 0 ? own : Block{meeting.rank - meeting.rank % fan, 1};
}

bool exists(const Meeting& meeting, const std::string& key, Duration timeout) {
  try {
    meeting.store.wait(key, std::max(timeout, store_probe));
    return true;
  } catch (const TimeoutError&) {
    return false;
  }
}

// Whether rank 0 has told an answer. Then all have come, and who was told takes back what it said.
bool is_concluded(const Meeting& meeting) {
  try {
    const std::string bytes = meeting.store.get(answer_key(meeting, {0, 1}), store_probe);
    return !decode_outcome(FieldReader(bytes, "rank 0").text(), "rank 0");
  } catch (const HolmesError&) {
    return false;
  }
}

// Those who said nothing; where all did, `awaited`, which said no more.
TimeoutError missing(const Meeting& meeting, int awaited) {
  std::vector<int> ranks;
  const bool have_all_come = is_concluded(meeting);
  for (int rank = 0; rank < meeting.size && !have_all_come; ++rank)
    if (rank != meeting.rank && !exists(meeting, key_of(meeting, rank), store_probe)) ranks.push_back(rank);
  if (ranks.empty()) ranks.push_back(awaited);
  return TimeoutError(ranks_text(ranks) + " of " + std::to_string(meeting.size) + " did not take part in " +
                          meeting.what + " within " + seconds_text(meeting.timeout) +
                          ": check that every rank is running, as one process with a rank of its own (RANK), and "
                          "makes this call, and that all reach the store",
                      {.peer = ranks.front()});
}

// What is said where nothing has failed: how many ranks one knows of, then these.
std::string success(const Meeting& meeting, std::span<const std::string> said) {
  FieldWriter writer;
  writer.add(encode_success());
  writer.add(static_cast<std::uint64_t>(meeting.size));
  for (const std::string& one : said) writer.add(one);
  return writer.take();
}

std::string failure(const HolmesError& error) {
  FieldWriter writer;
  writer.add(encode(failure_of(error)));
  return writer.take();
}

// Throws the writer's failure, and where it knows of another number of ranks.
std::vector<std::string> said_by(const Meeting& meeting, int rank, const std::string& bytes) {
  const std::string writer = "rank " + std::to_string(rank);
  FieldReader reader(bytes, writer);
  const std::string outcome = reader.text();
  if (const auto failed = decode_outcome(outcome, writer)) failed->raise();
  const std::uint64_t size = reader.number(std::numeric_limits<int>::max());
  if (size != static_cast<std::uint64_t>(meeting.size))
    throw UsageError(writer + " says that there are " + std::to_string(size) + " ranks, but rank " +
                         std::to_string(meeting.rank) + " says " + std::to_string(meeting.size) +
                         ": give every rank the same number (WORLD_SIZE)",
                     {.peer = rank});
  std::vector<std::string> said;
  while (!reader.at_end()) said.push_back(reader.text());
  return said;
}

// As said_by, of what is under `key` by the deadline.
std::vector<std::string> await_said(const Meeting& meeting, int rank, const std::string& key,
                                    Clock::time_point deadline) {
  if (!exists(meeting, key, deadline - Clock::now())) throw missing(meeting, rank);
  return said_by(meeting, rank, meeting.store.get(key, store_probe));
}

void check_count(const Meeting& meeting, int rank, std::size_t count, std::size_t expected) {
  if (count == expected) return;
  throw ProtocolError("what rank " + std::to_string(rank) + " wrote into the store for " + meeting.what + " has " +
                          std::to_string(count) + " parts in place of " + std::to_string(expected) +
                          "; use a store that only this job can write",
                      {.peer = rank});
}

// A failure as each rank raises it: with its own number, and without a peer where it is the one.
[[noreturn]] void raise(Failure failed, int rank) {
  failed.context.rank = rank;
  if (failed.context.peer == rank) failed.context.peer.reset();
  failed.raise();
}

// What its block brings, by rank.
std::vector<std::string> collect(const Meeting& meeting, const Block& block, std::string own,
                                 Clock::time_point deadline) {
  std::vector<std::string> values{std::move(own)};  // not read back
  // Who has another number of ranks may wait for nobody of these.
  if (block.level > 0 && block.first != 0) await_said(meeting, 0, key_of(meeting, 0), deadline);
  for (const Block& part : parts_of(meeting, block)) {
    auto its = await_said(meeting, part.first, key_of(meeting, part), deadline);
    check_count(meeting, part.first, its.size(), count_of(meeting, part));
    std::ranges::move(its, std::back_inserter(values));
  }
  return values;
}

// To the ranks of a block that do not read with its first one, under the keys where they look. `said(part)` finds a
// part of the block.
template <typename Said>
void tell(const Meeting& meeting, const Block& block, const Said& said) {
  for (const Block& part : parts_of(meeting, block))
    if (part.level > 0) meeting.store.set(answer_key(meeting, part), said(part));
  if (block.level > 1 || block.first == 0)
    meeting.store.set(answer_key(meeting, {block.first, 1}), said({block.first, 1}));
}

// Of what `whole` is told, for all and then for each of its ranks, what a part of it is told.
std::string of_part(const Meeting& meeting, const Block& whole, const std::vector<std::string>& said,
                    const Block& part) {
  std::vector<std::string> its{said.front()};
  const auto at = [&](int rank) { return said.begin() + 1 + (rank - whole.first); };
  if (said.size() > 1) its.insert(its.end(), at(part.first), at(end_of(meeting, part)));
  return success(meeting, its);
}

// To all who wait for this rank, in either direction.
void tell_failure(const Meeting& meeting, const Block& block, const HolmesError& error, bool has_come) {
  const std::string said = failure(error);
  if (!has_come) meeting.store.set(key_of(meeting, meeting.rank), said);
  if (block.level > 0) meeting.store.set(key_of(meeting, block), said);
  tell(meeting, block, [&](const Block&) { return said; });
  if (block.level == 1) meeting.store.set(answer_key(meeting, block), said);
}

// After the answer: who leads this rank has read what it brought.
void forget(const Meeting& meeting, const Block& block) {
  if (meeting.rank == 0) return;
  std::vector<std::string> own{key_of(meeting, meeting.rank)};
  if (block.level > 0) own.push_back(key_of(meeting, block));
  remove_if_possible(meeting.store, own);
}

}  // namespace

Seal seal_for(const Seal& answer, int rank) { return {answer.secret, answer.key + "/" + std::to_string(rank)}; }

Answer meet(const Meeting& meeting, const Bring& bring, const Conclude& conclude) {
  check_place(meeting.rank, meeting.size);
  const auto deadline = Clock::now() + meeting.timeout;
  const auto waiting = show_waiting(meeting);
  const Block block = block_of(meeting);
  const Block with = told_with(meeting);
  Seal seal{"", meeting.key + "/answer"};
  const auto seal_of = [&](int rank) { return Seal{seal.secret, key_of(meeting, rank)}; };
  bool has_come = false;
  try {
    seal.secret = given_secret(meeting.secret, Env::read()).value_or("");
    std::string own = bring(seal_of(meeting.rank));
    meeting.store.set(key_of(meeting, meeting.rank), success(meeting, {&own, 1}));
    has_come = true;
    const auto values = collect(meeting, block, std::move(own), deadline);
    std::vector<std::string> said;  // to all, and to each rank of `with` or to none
    if (meeting.rank == 0) {
      std::vector<Sealed> all;
      for (const std::string& value : values) all.push_back({value, seal_of(static_cast<int>(all.size()))});
      Conclusion conclusion = conclude(all, seal);
      said.push_back(std::move(conclusion.for_all));
      std::ranges::move(conclusion.for_each, std::back_inserter(said));
      // Of what it brought only the number of ranks stays, for who comes with another one.
      meeting.store.set(key_of(meeting, 0), success(meeting, {}));
    } else {
      if (block.level > 0) meeting.store.set(key_of(meeting, block), success(meeting, values));
      said = await_said(meeting, with.first, answer_key(meeting, with), deadline);
    }
    if (said.size() != 1) check_count(meeting, with.first, said.size(), 1 + count_of(meeting, with));
    tell(meeting, block, [&](const Block& part) { return of_part(meeting, with, said, part); });
    forget(meeting, block);
    const std::size_t at = 1 + static_cast<std::size_t>(meeting.rank - with.first);
    return {{said.front(), seal}, {said.size() > 1 ? said[at] : "", seal_for(seal, meeting.rank)}};
  } catch (const HolmesError& error) {
    tell_failure(meeting, block, error, has_come);
    raise(failure_of(error), meeting.rank);
  }
}

}  // namespace holmes
