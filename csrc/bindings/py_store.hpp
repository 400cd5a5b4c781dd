// Any Python object with set, get and wait as a Store: torch.distributed's stores, our own, a user's.
#pragma once

#include <pybind11/pybind11.h>

#include "holmes/bootstrap/store.hpp"

namespace holmes {

// Our own stores are used as they are, anything else through its methods. Throws UsageError where one is missing.
std::shared_ptr<Store> to_store(const pybind11::object& object);

}  // namespace holmes
