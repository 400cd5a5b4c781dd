#include "holmes/bootstrap/rendezvous.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "holmes/core/log.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

constexpr Duration alarm_interval = 1s;  // how often a rank that waits for a record looks for an alarm
constexpr Duration alarm_wait = 5ms;     // how long it waits for one
// Past the deadline: for the outcomes to arrive, and for the decision on them.
constexpr Duration outcome_grace = 1s;
constexpr Duration decision_grace = 1500ms;
// The same after a failure, where the deadline is far.
constexpr Duration outcome_wait = 3s;
constexpr Duration decision_wait = 5s;

bool leads_to(const Failure& failure, std::optional<int> rank) {
  return rank && (failure.context.rank == rank || failure.context.peer == rank);
}

// Causes before consequences: the failure that all ranks raise is the one that comes first here.
int order_of(const Failure& failure, std::optional<int> cut_off) {
  switch (failure.kind) {
    case ErrorKind::usage:
    case ErrorKind::nic:
    case ErrorKind::mismatch:
      return 0;
    case ErrorKind::protocol:
      return 1;
    case ErrorKind::system:
      return 2;
    case ErrorKind::unreachable:
      return (leads_to(failure, cut_off) ? 3 : 5) + (failure.context.system_errno ? 0 : 1);
    case ErrorKind::timeout:
      return 8;
    default:
      return 7;
  }
}

// The rank that most of the paths which are cut lead to, where one stands out: it is cut off itself.
std::optional<int> cut_off_rank(const std::vector<Failure>& failures) {
  std::set<std::pair<int, int>> paths;
  for (const auto& failure : failures) {
    const auto rank = failure.context.rank, peer = failure.context.peer;
    if (failure.kind == ErrorKind::unreachable && rank && peer) paths.insert(std::minmax(*rank, *peer));
  }
  std::map<int, int> counts;
  for (const auto& [low, high] : paths) ++counts[low], ++counts[high];
  const auto most = std::ranges::max_element(counts, {}, [](const auto& entry) { return entry.second; });
  const auto is_as_many = [&](const auto& entry) { return entry.second == most->second; };
  if (most == counts.end() || std::ranges::count_if(counts, is_as_many) > 1) return std::nullopt;
  return most->first;
}

// What all ranks raise. Where it is the failure of a rank that is cut off itself: about that one, not the one it tried.
std::optional<Failure> cause_of(const std::vector<Failure>& failures) {
  const auto cut_off = cut_off_rank(failures);
  const auto first =
      std::ranges::min_element(failures, {}, [&](const Failure& failure) { return order_of(failure, cut_off); });
  if (first == failures.end()) return std::nullopt;
  Failure cause = *first;
  const auto seen = std::ranges::find_if(failures, [&](const auto& other) { return other.context.peer == cut_off; });
  if (cause.kind != ErrorKind::unreachable || !cut_off || cause.context.rank != cut_off || seen == failures.end())
    return cause;
  cause.context.peer.reset();
  cause.context.host = seen->context.host;
  cause.message = "rank " + std::to_string(*cut_off) + " (host " + cause.context.host +
                  ") is cut off from more than one rank: " + cause.message;
  return cause;
}

}  // namespace

void Rendezvous::publish(const RankInfo& record, const std::string& secret) {
  secret_ = secret;
  const std::string bytes = encode(record, seal_of(options_.rank));
  store_.set(rank_key(options_.rank), bytes);
  published_ = bytes;
}

std::vector<RankInfo> Rendezvous::gather() {
  std::vector<std::string> all;
  if (options_.rank != 0) all = take_all();
  std::vector<RankInfo> records;
  FieldWriter passed_on;
  passed_on.add(encode_success());
  for (int rank = 0; rank < options_.size; ++rank) {
    if (options_.rank == 0) {
      auto bytes = await(rank_key(rank));
      if (!bytes) throw_missing(rank);
      all.push_back(std::move(*bytes));
    }
    records.push_back(decode(rank, all[static_cast<std::size_t>(rank)]));
    passed_on.add(all[static_cast<std::size_t>(rank)]);
  }
  const std::string value = passed_on.take();
  digest_ = sha256(value);
  if (options_.rank == 0) {
    store_.set(key("records"), value);
    passed_on_ = true;
  }
  return records;
}

std::vector<std::string> Rendezvous::take_all() {
  const auto bytes = await(key("records"));
  if (!bytes) {
    for (int rank = 0; rank < options_.size && Clock::now() < deadline_ + outcome_grace / 2; ++rank) {
      if (!get(rank_key(rank), 1ms)) throw_missing(rank);
    }
    const auto first = get(rank_key(0), 1ms);
    const std::string host = first ? decode(0, *first).host : "";
    throw TimeoutError(rank_text(0) + (host.empty() ? "" : " (host " + host + ")") + " of communicator '" +
                           options_.name + "' did not pass on how to reach the others within " +
                           seconds_text(options_.connect_timeout) + "; check that it still runs",
                       {.rank = label(options_.rank), .peer = label(0), .host = host});
  }
  const std::string writer = rank_text(0);
  FieldReader reader(*bytes, writer);
  if (const auto failure = decode_outcome(reader.text(), writer)) failure->raise();
  std::vector<std::string> all;
  for (int rank = 0; rank < options_.size; ++rank) all.push_back(reader.text());
  if (!reader.at_end()) reader.refuse();
  return all;
}

RankInfo Rendezvous::decode(int rank, const std::string& bytes) const {
  const std::string* written = rank == options_.rank ? &published_.value() : nullptr;
  try {
    return decode_rank(bytes, rank_text(rank), seal_of(rank), written);
  } catch (const ProtocolError& error) {
    if (error.context().peer) throw;  // of a rank that failed
    throw ProtocolError(error.what(), {.rank = label(options_.rank), .peer = label(rank)});
  }
}

void Rendezvous::look_for_alarm() {
  const auto bytes = get(key("alarm"), alarm_wait);
  if (!bytes) return;
  if (const auto failure = decode_outcome(*bytes, "another rank")) failure->raise();
}

void Rendezvous::raise_alarm(const Failure& own) {
  if (!published_) store_.set(rank_key(options_.rank), encode(own));
  if (options_.rank == 0 && !passed_on_) {
    FieldWriter writer;
    writer.add(encode(own));
    store_.set(key("records"), writer.take());
  }
  store_.set(key("alarm"), encode(own));
  store_.set(ok_key(options_.rank), encode(own));
}

std::optional<Failure> Rendezvous::agree(const std::optional<Failure>& own) {
  if (own) {
    raise_alarm(*own);
  } else if (options_.rank != 0) {
    store_.set(ok_key(options_.rank), encode_success());
  }
  if (options_.rank == 0) {
    const auto decision = collect(own);
    if (!decision) replace_records();
    store_.set(key("decision"), decision ? encode(*decision) : encode_success());
    return decision;
  }
  if (is_missing(0)) return own;
  const auto now = Clock::now();
  const auto until = own ? std::min(deadline_ + decision_grace, now + decision_wait) : deadline_ + decision_grace;
  if (const auto bytes = get(key("decision"), std::max(Duration(until - now), alarm_wait))) {
    const auto decision = decode_outcome(*bytes, rank_text(0));
    return decision ? decision : own;
  }
  if (own) return own;
  return failure_of(TimeoutError(rank_text(0) + " of communicator '" + options_.name +
                                     "' did not say how the set-up ended; check that it still runs",
                                 {.rank = label(options_.rank), .peer = label(0)}));
}

// All have succeeded, and so read them.
void Rendezvous::replace_records() {
  const std::string size = std::to_string(options_.size);
  FieldWriter writer;
  writer.add(encode(Failure{ErrorKind::usage,
                            "communicator '" + options_.name + "' is set up already, with all of its " + size +
                                " ranks; give every process a rank of its own (RANK), and each communicator a name",
                            {.peer = label(0)}}));
  store_.set(key("records"), writer.take());
}

void Rendezvous::forget() {
  std::vector<std::string> own{rank_key(options_.rank)};
  if (options_.rank != 0) own.push_back(ok_key(options_.rank));
  remove_if_possible(store_, own);
}

std::optional<std::string> Rendezvous::get(const std::string& name, Duration timeout) {
  try {
    return store_.get(name, timeout);
  } catch (const TimeoutError&) {
    return std::nullopt;
  }
}

std::optional<std::string> Rendezvous::await(const std::string& name) {
  while (true) {
    if (auto bytes = get(name, std::clamp(Duration(deadline_ - Clock::now()), alarm_wait, alarm_interval)))
      return bytes;
    look_for_alarm();
    if (Clock::now() >= deadline_) return std::nullopt;
  }
}

bool Rendezvous::is_missing(int rank) const { return std::ranges::find(missing_, rank) != missing_.end(); }

void Rendezvous::throw_missing(int first) {
  missing_ = {first};
  for (int rank = first + 1; rank < options_.size && Clock::now() < deadline_ + outcome_grace / 2; ++rank) {
    if (!get(rank_key(rank), 1ms)) missing_.push_back(rank);
  }
  const std::string text = joined(missing_, ", ", [this](int rank) { return std::to_string(label(rank)); });
  throw TimeoutError(
      (missing_.size() == 1 ? "rank " : "ranks ") + text + " of communicator '" + options_.name + "' (" +
          std::to_string(options_.size) + " ranks) did not show up within " + seconds_text(options_.connect_timeout) +
          "; check that every rank was started, uses the same store and makes this communicator, or raise "
          "the connect timeout",
      {.rank = label(options_.rank), .peer = label(first)});
}

std::optional<Failure> Rendezvous::collect(const std::optional<Failure>& own) {
  std::vector<Failure> failures;
  auto until = deadline_ + outcome_grace;
  const auto add = [&](const Failure& failure) {
    failures.push_back(failure);
    until = std::min(until, Clock::now() + outcome_wait);  // the others have an alarm to follow
  };
  if (own) add(*own);
  for (int rank = 1; rank < options_.size; ++rank) {
    if (is_missing(rank)) continue;
    const auto bytes = get(ok_key(rank), std::max(Duration(until - Clock::now()), alarm_wait));
    try {
      if (!bytes) {
        throw TimeoutError(rank_text(rank) + " of communicator '" + options_.name +
                               "' did not finish the set-up; check that it still runs",
                           {.rank = label(0), .peer = label(rank)});
      }
      if (const auto failure = decode_outcome(*bytes, rank_text(rank))) add(*failure);
    } catch (const HolmesError& error) {
      add(failure_of(error));
    }
  }
  return cause_of(failures);
}

}  // namespace holmes
