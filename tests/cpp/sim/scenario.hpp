// Scenario: the ranks of one group, each a process on a host of its own, set it up, reduce eight bytes and leave.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sim/network.hpp"

namespace holmes::sim {

struct Scenario {
  int ranks = 32;
  int wide_min_ranks = 257;
  std::uint64_t seed = 1;
  bool has_tcp_store = true;  // else one without sockets
  Time connect_timeout = 60 * second;
  Time starts_within = 10 * millisecond;
  Paths paths{};
  int operations = 0;           // more of them, of every kind and size by seed; each is compared with its plain result
  bool agrees_on_nics = false;  // else every rank is told its NIC
  int killed = 0;               // ranks, each at one of its first `kill_within_calls` system calls
  bool kills_hosts = false;     // of which nobody hears, until a time is over
  std::uint64_t kill_within_calls = 0;
  bool is_strict = false;  // errors have to name a rank that was killed, and not only a rank
};

// What a rank has done so far is counted when it is set up, after the first all_reduce and after the second.
inline constexpr std::size_t stages = 3;

struct RankReport {
  bool is_killed = false;
  bool has_ended = false;
  std::string problem{};  // that it raised; empty: none
  bool names_a_rank = false;
  bool names_a_lost_rank = false;
  Time began = 0, set_up = 0, ended = 0;
  std::array<Traffic, stages> traffic{};
  std::array<Time, stages> at{};  // when it had done so much
  std::uint64_t calls = 0;
};

struct Report {
  Scheduler::End end = Scheduler::End::over;
  std::uint64_t digest = 0;
  std::uint64_t misuses = 0;  // of descriptors
  std::uint64_t switches = 0;
  std::vector<RankReport> ranks;
  std::string where_it_stands;  // where it did not end: the last calls of the threads
};

Report run(const Scenario& scenario);

// What is wrong with it, by what every run owes: it ends; who is not killed succeeds or raises an error that names a
// rank, in time. Empty: nothing.
std::string problem_of(const Scenario& scenario, const Report& report);

}  // namespace holmes::sim
