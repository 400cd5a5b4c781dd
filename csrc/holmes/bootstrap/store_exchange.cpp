#include "holmes/bootstrap/store_exchange.hpp"

#include <algorithm>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/core/fields.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

constexpr Duration probe = 10ms;  // to ask whether a key exists; a store has no other question for it

std::string key_of(const Meeting& meeting, int rank) { return meeting.key + "/" + std::to_string(rank); }

bool exists(const Meeting& meeting, const std::string& key, Duration timeout) {
  try {
    meeting.store.wait(key, std::max(timeout, probe));
    return true;
  } catch (const TimeoutError&) {
    return false;
  }
}

// Those who said nothing.
TimeoutError missing(const Meeting& meeting) {
  std::vector<int> ranks;
  for (int rank = 0; rank < meeting.size; ++rank)
    if (rank != meeting.rank && !exists(meeting, key_of(meeting, rank), probe)) ranks.push_back(rank);
  if (ranks.empty()) ranks.push_back(0);
  return TimeoutError(ranks_text(ranks) + " of " + std::to_string(meeting.size) + " did not take part in " +
                          meeting.what + " within " + seconds_text(meeting.timeout) +
                          ": check that every rank is running and makes this call, and that all reach the store",
                      {.peer = ranks.front()});
}

std::vector<std::string> collect(const Meeting& meeting, Clock::time_point deadline) {
  std::vector<std::string> values;
  for (int rank = 0; rank < meeting.size; ++rank) {
    if (!exists(meeting, key_of(meeting, rank), deadline - Clock::now())) throw missing(meeting);
    values.push_back(meeting.store.get(key_of(meeting, rank), probe));
  }
  return values;
}

// A failure as each rank raises it: with its own number, and without a peer where it is the one.
[[noreturn]] void raise(Failure failure, int rank) {
  failure.context.rank = rank;
  if (failure.context.peer == rank) failure.context.peer.reset();
  failure.raise();
}

}  // namespace

std::string meet(const Meeting& meeting, const std::string& value,
                 const std::function<std::string(const std::vector<std::string>&)>& conclude) {
  const auto deadline = Clock::now() + meeting.timeout;
  const std::string answer_key = meeting.key + "/answer";
  meeting.store.set(key_of(meeting, meeting.rank), value);
  if (meeting.rank == 0) {
    FieldWriter answer;
    try {
      const std::string text = conclude(collect(meeting, deadline));
      answer.add(encode_success());
      answer.add(text);
      meeting.store.set(answer_key, answer.take());
      return text;
    } catch (const HolmesError& error) {
      answer.add(encode(failure_of(error)));
      meeting.store.set(answer_key, answer.take());
      raise(failure_of(error), meeting.rank);
    }
  }
  if (!exists(meeting, answer_key, deadline - Clock::now())) raise(failure_of(missing(meeting)), meeting.rank);
  const std::string bytes = meeting.store.get(answer_key, probe);
  const std::string writer = "rank 0";
  FieldReader answer(bytes, writer);
  const std::string outcome = answer.text();
  if (const auto failure = decode_outcome(outcome, writer)) raise(*failure, meeting.rank);
  return answer.text();
}

}  // namespace holmes
