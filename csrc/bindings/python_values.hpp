// Values of the engine as Python has them: durations, NICs, options, connections. Shared by both modules (_C and
// _c10d).
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "holmes/core/connection_info.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/options.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

// (interface, address).
using NicPairs = std::vector<std::pair<std::string, std::string>>;

inline std::vector<NicBinding> to_bindings(const NicPairs& nics) {
  std::vector<NicBinding> bindings;
  for (const auto& [interface, address] : nics) bindings.push_back({interface, address});
  return bindings;
}

// Absent: no limit.
using TimeoutSeconds = std::optional<double>;

// Throws UsageError naming `what` where the value is not above 0, or longer than a Duration can be.
inline Duration to_duration(const char* what, double seconds) {
  constexpr double max_seconds = 1e9;
  if (!(seconds > 0) || seconds > max_seconds) {
    std::array<char, 32> digits{};
    std::snprintf(digits.data(), digits.size(), "%#g", seconds);
    throw UsageError(std::string(what) + " is " + digits.data() + "; it must be more than 0 and at most 1e9 seconds");
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// Of CommunicatorOptions, whose fields are known only by the list in holmes/core/options.hpp: a field's type as Python
// has it. The same for all but the following.
template <typename Field>
struct PythonField {
  using Type = Field;
  static Type get(const Field& field) { return field; }
  static Field set(const char* /*name*/, Type value) { return value; }
};

template <>
struct PythonField<Duration> {
  using Type = double;  // seconds
  static Type get(Duration field) { return std::chrono::duration<double>(field).count(); }
  static Duration set(const char* name, Type seconds) { return to_duration(name, seconds); }
};

template <>
struct PythonField<Transport> {
  using Type = std::string;
  static Type get(Transport field) { return holmes::name(field); }
  static Transport set(const char* /*name*/, const Type& text) { return transport_from_name(text); }
};

template <>
struct PythonField<std::optional<TlsMode>> {
  using Type = std::optional<std::string>;
  static Type get(std::optional<TlsMode> field) { return field ? Type(holmes::name(*field)) : std::nullopt; }
  static std::optional<TlsMode> set(const char* /*name*/, const Type& text) {
    return text ? std::optional(tls_mode_from_name(*text)) : std::nullopt;
  }
};

template <>
struct PythonField<std::vector<NicBinding>> {
  using Type = NicPairs;
  static Type get(const std::vector<NicBinding>& field) {
    NicPairs pairs;
    for (const NicBinding& nic : field) pairs.emplace_back(nic.interface, nic.address);
    return pairs;
  }
  static std::vector<NicBinding> set(const char* /*name*/, const Type& pairs) { return to_bindings(pairs); }
};

// A number of bytes, or "never", its largest value.
template <>
struct PythonField<std::optional<std::uint64_t>> {
  using Type = pybind11::object;
  static Type get(std::optional<std::uint64_t> field) {
    if (field == never_hierarchical) return pybind11::str("never");
    return pybind11::cast(field);
  }
  static std::optional<std::uint64_t> set(const char* name, const Type& value) {
    if (value.is_none()) return std::nullopt;
    if (value.equal(pybind11::str("never"))) return never_hierarchical;
    if (PyLong_Check(value.ptr())) {
      const auto bytes = PyLong_AsUnsignedLongLong(value.ptr());
      if (!PyErr_Occurred() && bytes < never_hierarchical) return bytes;
      PyErr_Clear();
    }
    throw UsageError(std::string(name) + "=" + pybind11::repr(value).cast<std::string>() +
                     " is not possible; it must be a number of bytes, 0 or more, or \"never\"");
  }
};

// Of a Python object with the fields as attributes: of _C.CommunicatorOptions, which _c10d has no C++ type for.
inline CommunicatorOptions options_of(const pybind11::handle& object) {
  CommunicatorOptions options;
  visit_fields([&]<typename Field>(const char* name, Field CommunicatorOptions::* field) {
    using Python = PythonField<Field>;
    options.*field = Python::set(name, object.attr(name).cast<typename Python::Type>());
  });
  return options;
}

inline pybind11::dict to_dict(const ConnectionInfo& info) {
  using namespace pybind11::literals;
  return pybind11::dict(
      "peer"_a = info.peer, "host"_a = info.host, "transport"_a = info.transport, "purpose"_a = info.purpose,
      "interface"_a = info.interface, "local_address"_a = info.local_address, "remote_address"_a = info.remote_address,
      "device_bound"_a = info.device_bound, "retired"_a = info.is_retired, "sent_bytes"_a = info.sent_bytes,
      "received_bytes"_a = info.received_bytes, "retransmitted_segments"_a = info.retransmitted_segments,
      "path"_a = info.is_between ? "inter" : "intra", "resent_chunks"_a = info.resent_chunks,
      "round_trip_us"_a = info.round_trip_us, "busy_us"_a = info.busy_us,
      "receiver_limited_us"_a = info.receiver_limited_us, "buffer_limited_us"_a = info.buffer_limited_us,
      "stalls"_a = info.stalls, "stalled_us"_a = info.stalled_us, "path_bytes_per_s"_a = info.path_bytes_per_s,
      "path_changes"_a = info.path_changes, "encryption"_a = info.encryption);
}

}  // namespace holmes
