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
using Bring = std::function<std::string(const Seal&)>;
using Conclude = std::function<std::string(const std::vector<Sealed>&, const Seal&)>;

// What everybody brings to rank 0, and what that concludes from all of it, by rank, to everybody: two keys and two
// waits a rank. Collective. Throws on every rank what `bring` and `conclude` throw, and TimeoutError naming those who
// did not come; UsageError where the meeting has no such rank, and where ranks know of different numbers of them.
Sealed meet(const Meeting& meeting, const Bring& bring, const Conclude& conclude);

}  // namespace holmes
