// StoreExchange: how ranks that have only a Store yet tell each other something.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "holmes/bootstrap/sealed_fields.hpp"
#include "holmes/bootstrap/store.hpp"

namespace holmes {

// Where and when ranks meet. `secret`: the job's, as CommunicatorOptions::secret. One thread.
struct Meeting {
  Store& store;
  std::string key;   // a fresh one for each meeting; the keys used start with it
  std::string what;  // for messages: "choosing the NICs"
  int rank = 0;
  int size = 1;
  Duration timeout{};
  std::string secret{};
};

// Bytes of a SealedWriter, and the seal to read them with.
struct Sealed {
  std::string bytes;
  Seal seal;
};
// What rank 0 says: to all, and to each rank what only that one is to know; none of these, or one for each rank.
struct Conclusion {
  std::string for_all;
  std::vector<std::string> for_each{};
};
struct Answer {
  Sealed for_all;
  Sealed own;  // empty: nothing was said to each
};
using Bring = std::function<std::string(const Seal&)>;
using Conclude = std::function<Conclusion(const std::vector<Sealed>&, const Seal&)>;

// The seal of what is said to `rank`, where `answer` is that of what is said to all.
Seal seal_for(const Seal& answer, int rank);

// What everybody brings to rank 0, and what that concludes from all of it, by rank. Over a tree, each inner node of
// which takes from fifteen ranks, or blocks of them, and tells them, on each of its levels: two keys and two waits a
// rank, and no more where there are up to sixteen. Collective. Throws on every rank what `bring` and `conclude` throw,
// and TimeoutError naming those who did not come; UsageError where the meeting has no such rank, and where ranks know
// of different numbers of them.
Answer meet(const Meeting& meeting, const Bring& bring, const Conclude& conclude);

}  // namespace holmes
