// Rendezvous: what the ranks of one communicator say to each other through the Store while it is set up.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/bootstrap/sha256.hpp"
#include "holmes/bootstrap/store.hpp"

namespace holmes {

// Keys, below the communicator's name:
//   rank/<r>  how to reach rank r, or why it failed; rank 0 reads these
//   records   by rank 0: all of them, as they were written, or why it could not; all others read this. Once all have
//             succeeded: that who comes now is too late
//   alarm     a failure of some rank: end the set-up
//   ok/<r>    how the set-up ended on rank r
//   decision   by rank 0: success of all, or the failure that all raise
// A rank sets at most four keys, reads two and removes two; rank 0 sets three more and reads two per rank. One thread.
class Rendezvous {
public:
  Rendezvous(Store& store, const CommunicatorOptions& options, Clock::time_point deadline)
      : store_(store), options_(options), deadline_(deadline) {}

  // `secret`: what the ranks were given, or nothing.
  void publish(const RankInfo& record, const std::string& secret);
  // All ranks' records. Throws the failure of a rank that wrote one, TimeoutError naming the ranks that never came,
  // ProtocolError naming the field where a record, also the own, is not what its rank wrote. Rank 0 passes them on, but
  // each is sealed by its own rank.
  std::vector<RankInfo> gather();
  // Of all records as they were gathered: whoever saw others has another one.
  const Digest& digest() const { return digest_; }
  // Throws the failure that another rank raised the alarm with.
  void look_for_alarm();
  // Tells how this rank fared; returns the failure all ranks raise, nothing where all succeeded.
  std::optional<Failure> agree(const std::optional<Failure>& own);
  // After `agree` has said that all succeeded: removes what this rank has set and nobody reads any more. A store that
  // cannot keeps it.
  void forget();
  // Raises the alarm and does not wait.
  void raise_alarm(const Failure& own);

private:
  std::string key(const std::string& end) const { return options_.name + "/" + end; }
  std::string rank_key(int rank) const { return key("rank/" + std::to_string(rank)); }
  Seal seal_of(int rank) const { return {secret_, rank_key(rank)}; }
  std::string ok_key(int rank) const { return key("ok/" + std::to_string(rank)); }
  std::optional<std::string> get(const std::string& name, Duration timeout);
  std::optional<std::string> await(const std::string& name);
  std::vector<std::string> read_all();
  std::vector<std::string> take_all();
  RankInfo decode(int rank, const std::string& bytes) const;
  [[noreturn]] void throw_missing(int first);
  void replace_records();
  std::optional<Failure> collect(const std::optional<Failure>& own);
  bool is_missing(int rank) const;
  int label(int rank) const { return label_of(options_, rank); }
  std::string rank_text(int rank) const { return "rank " + std::to_string(label(rank)); }

  Store& store_;
  const CommunicatorOptions& options_;
  Clock::time_point deadline_;
  std::string secret_;
  std::optional<std::string> published_;
  bool passed_on_ = false;  // rank 0: the records
  Digest digest_{};
  std::vector<int> missing_;  // ranks that did not show up
};

}  // namespace holmes
