// StoreExchange: how ranks that have only a Store yet tell each other something.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "holmes/bootstrap/store.hpp"

namespace holmes {

// Where and when ranks meet. One thread.
struct Meeting {
  Store& store;
  std::string key;   // a fresh one for each meeting; the keys used start with it
  std::string what;  // for messages: "choosing the NICs"
  int rank = 0;
  int size = 1;
  Duration timeout{};
};

// Everybody's value to rank 0 and what that concludes from all of them, by rank, to everybody: two keys and two waits a
// rank. Collective. Throws on every rank what `conclude` throws, and TimeoutError naming those who did not come.
std::string meet(const Meeting& meeting, const std::string& value,
                 const std::function<std::string(const std::vector<std::string>&)>& conclude);

}  // namespace holmes
