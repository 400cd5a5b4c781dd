#include "holmes/bootstrap/store_exchange.hpp"

#include <algorithm>
#include <limits>

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

std::string key_of(const Meeting& meeting, int rank) { return meeting.key + "/" + std::to_string(rank); }

bool exists(const Meeting& meeting, const std::string& key, Duration timeout) {
  try {
    meeting.store.wait(key, std::max(timeout, store_probe));
    return true;
  } catch (const TimeoutError&) {
    return false;
  }
}

// Those who said nothing.
TimeoutError missing(const Meeting& meeting) {
  std::vector<int> ranks;
  for (int rank = 0; rank < meeting.size; ++rank)
    if (rank != meeting.rank && !exists(meeting, key_of(meeting, rank), store_probe)) ranks.push_back(rank);
  if (ranks.empty()) ranks.push_back(0);
  return TimeoutError(ranks_text(ranks) + " of " + std::to_string(meeting.size) + " did not take part in " +
                          meeting.what + " within " + seconds_text(meeting.timeout) +
                          ": check that every rank is running, as one process with a rank of its own (RANK), and "
                          "makes this call, and that all reach the store",
                      {.peer = ranks.front()});
}

// What a rank says: how it fared, how many ranks it knows of, then its bytes.
std::string success(const Meeting& meeting, const std::string& bytes) {
  FieldWriter writer;
  writer.add(encode_success());
  writer.add(static_cast<std::uint64_t>(meeting.size));
  writer.add(bytes);
  return writer.take();
}

std::string failure(const HolmesError& error) {
  FieldWriter writer;
  writer.add(encode(failure_of(error)));
  return writer.take();
}

// Throws the writer's failure, and where it knows of another number of ranks.
std::string bytes_of(const Meeting& meeting, const std::string& said, int rank) {
  const std::string writer = "rank " + std::to_string(rank);
  FieldReader reader(said, writer);
  const std::string outcome = reader.text();
  if (const auto failed = decode_outcome(outcome, writer)) failed->raise();
  const std::uint64_t size = reader.number(std::numeric_limits<int>::max());
  if (size != static_cast<std::uint64_t>(meeting.size))
    throw UsageError(writer + " says that there are " + std::to_string(size) + " ranks, but rank " +
                         std::to_string(meeting.rank) + " says " + std::to_string(meeting.size) +
                         ": give every rank the same number (WORLD_SIZE)",
                     {.peer = rank});
  return reader.text();
}

// A failure as each rank raises it: with its own number, and without a peer where it is the one.
[[noreturn]] void raise(Failure failed, int rank) {
  failed.context.rank = rank;
  if (failed.context.peer == rank) failed.context.peer.reset();
  failed.raise();
}

std::vector<Sealed> collect(const Meeting& meeting, const Sealed& own, Clock::time_point deadline) {
  std::vector<Sealed> values{own};  // not read back
  for (int rank = 1; rank < meeting.size; ++rank) {
    const std::string key = key_of(meeting, rank);
    if (!exists(meeting, key, deadline - Clock::now())) throw missing(meeting);
    values.push_back({bytes_of(meeting, meeting.store.get(key, store_probe), rank), {own.seal.secret, key}});
  }
  return values;
}

}  // namespace

Sealed meet(const Meeting& meeting, const Bring& bring, const Conclude& conclude) {
  check_place(meeting.rank, meeting.size);
  const auto deadline = Clock::now() + meeting.timeout;
  const auto waiting = show_waiting(meeting);
  const std::string own_key = key_of(meeting, meeting.rank);
  Seal answer{"", meeting.key + "/answer"};
  if (meeting.rank == 0) {
    try {
      answer.secret = given_secret(meeting.secret, Env::read()).value_or("");
      const Sealed own{bring({answer.secret, own_key}), {answer.secret, own_key}};
      meeting.store.set(own_key, success(meeting, own.bytes));  // so that the others see that it came
      meeting.store.set(answer.key, success(meeting, conclude(collect(meeting, own, deadline), answer)));
    } catch (const HolmesError& error) {
      meeting.store.set(answer.key, failure(error));
      raise(failure_of(error), meeting.rank);
    }
  } else {
    try {
      answer.secret = given_secret(meeting.secret, Env::read()).value_or("");
      meeting.store.set(own_key, success(meeting, bring({answer.secret, own_key})));
    } catch (const HolmesError& error) {
      meeting.store.set(own_key, failure(error));
      throw;
    }
  }
  if (!exists(meeting, answer.key, deadline - Clock::now())) raise(failure_of(missing(meeting)), meeting.rank);
  try {
    return {bytes_of(meeting, meeting.store.get(answer.key, store_probe), 0), answer};
  } catch (const HolmesError& error) {
    raise(failure_of(error), meeting.rank);
  }
}

}  // namespace holmes
