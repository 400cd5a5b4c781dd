// simulate: the library itself at ranks that no machine has, over a network and a clock that exist only here.
//   simulate --ranks 1024 --seed 7            how many messages, connections and requests each rank needs
//   simulate --ranks 64 --seeds 100 --kill 2  ranks that die at a random place, by seed
// The same seed runs the same again, down to the order of every message (the digest says so).
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sim/scenario.hpp"

using namespace holmes::sim;

namespace {

struct Arguments {
  std::vector<int> ranks = {64};
  Scenario scenario{};
  std::uint64_t seeds = 1;
  std::string store = "auto";
  bool is_check = false;
};

constexpr int most_ranks_of_tcp_store = 4096;
constexpr const char* usage =
    "usage: simulate [--ranks N,N,...] [--wide-min-ranks N] [--operations COUNT] [--seed S] [--seeds COUNT]\n"
    "                [--kill RANKS] [--hosts] [--strict] [--slow PER_1000] [--store tcp|none|auto]\n"
    "                [--connect-timeout SECONDS] [--agree-on-nics]\n"
    "       simulate --check\n";

// The CPU that this program has used, which is all that it does.
double seconds_used() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

double most_gb() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_maxrss) / (1 << 20);
}

void print_line(const char* what, const Report& report, const std::function<std::uint64_t(const RankReport&)>& of) {
  std::uint64_t total = 0, most = 0;
  for (const RankReport& rank : report.ranks) {
    total += of(rank);
    most = std::max(most, of(rank));
  }
  std::printf("  %-42s %12" PRIu64 " %10.1f %8" PRIu64 "\n", what, total,
              static_cast<double>(total) / static_cast<double>(report.ranks.size()), most);
}

std::uint64_t messages(const Traffic& traffic, Use use) { return traffic.messages[static_cast<std::size_t>(use)]; }

std::uint64_t data_messages(const Traffic& traffic) {
  return messages(traffic, Use::collective) + messages(traffic, Use::p2p);
}

void print_counts(const Report& report) {
  Time set_up = 0;
  for (const RankReport& rank : report.ranks) set_up = std::max(set_up, rank.set_up - rank.began);
  std::printf("  set up after %.3f s of virtual time at most\n", static_cast<double>(set_up) / second);
  std::printf("  %-42s %12s %10s %8s\n", "set-up", "total", "mean", "most");
  const auto after = [](std::size_t stage, const auto& count) {
    return [stage, count](const RankReport& rank) { return count(rank.traffic[stage]); };
  };
  const auto since = [](std::size_t stage, const auto& count) {
    return
        [stage, count](const RankReport& rank) { return count(rank.traffic[stage]) - count(rank.traffic[stage - 1]); };
  };
  const auto of_use = [](Use use) { return [use](const Traffic& traffic) { return messages(traffic, use); }; };
  print_line("requests to the store", report, after(0, of_use(Use::store)));
  print_line("  of them sets", report, after(0, [](const Traffic& traffic) { return traffic.store_sets; }));
  print_line("connections to ranks", report, after(0, [](const Traffic& traffic) {
               return traffic.connections[0] + traffic.connections[1] + traffic.connections[2];
             }));
  print_line("descriptors open", report, after(0, [](const Traffic& traffic) { return traffic.descriptors; }));
  print_line("messages of handshakes", report, after(0, [](const Traffic& traffic) { return traffic.handshakes; }));
  print_line("messages on control connections", report, after(0, of_use(Use::control)));
  print_line("messages on data connections", report, after(0, data_messages));
  std::printf("  first all_reduce of 8 bytes\n");
  print_line("messages on control connections", report, since(1, of_use(Use::control)));
  print_line("messages on data connections", report, since(1, data_messages));
  const auto last = [&](std::size_t stage) {
    Time at = 0;
    for (const RankReport& rank : report.ranks) at = std::max(at, rank.at[stage]);
    return at;
  };
  std::printf("  second all_reduce of 8 bytes, %.0f us of virtual time after the first\n",
              static_cast<double>(last(2) - last(1)) * 1e6 / static_cast<double>(second));
  print_line("messages on control connections", report, since(2, of_use(Use::control)));
  print_line("messages on data connections", report, since(2, data_messages));
}

// `is_told`: what became of every rank.
bool run_one(const Scenario& scenario, bool is_told) {
  const double before = seconds_used();
  const Report report = run(scenario);
  const std::string problem = problem_of(scenario, report);
  const auto killed = std::ranges::count_if(report.ranks, [](const RankReport& rank) { return rank.is_killed; });
  const auto failed = std::ranges::count_if(report.ranks, [](const RankReport& rank) { return !rank.problem.empty(); });
  const auto told = std::ranges::count_if(report.ranks, [](const RankReport& rank) { return rank.names_a_lost_rank; });
  Time last = start_time;
  for (const RankReport& rank : report.ranks) last = std::max(last, rank.ended);
  std::printf("%d ranks, wide from %d on, seed %" PRIu64
              ": %td killed, %td raised an error, of which %td name who was "
              "killed; the last ended after "
              "%.3f s; digest %016" PRIx64 "; %" PRIu64 " switches, %.1f s of processor time, %.2f GB\n",
              scenario.ranks, scenario.wide_min_ranks, scenario.seed, killed, failed, told,
              static_cast<double>(last - start_time) / second, report.digest, report.switches, seconds_used() - before,
              most_gb());
  for (std::size_t rank = 0; is_told && rank < report.ranks.size(); ++rank) {
    const RankReport& one = report.ranks[rank];
    std::printf("  rank %zu ended after %.6f s: %s\n", rank, static_cast<double>(one.ended - start_time) / second,
                one.is_killed         ? "killed"
                : one.problem.empty() ? "done"
                                      : one.problem.c_str());
  }
  if (problem.empty()) return true;
  std::printf("FAILED with --seed %" PRIu64 ": %s\n", scenario.seed, problem.c_str());
  return false;
}

// A run in which nobody dies tells how many system calls a rank makes: victims die at one of these.
bool run_seeds(const Arguments& arguments, int ranks) {
  Scenario scenario = arguments.scenario;
  scenario.ranks = ranks;
  scenario.has_tcp_store = arguments.store == "tcp" || (arguments.store == "auto" && ranks <= most_ranks_of_tcp_store);
  Scenario calm = scenario;
  calm.killed = 0;
  bool is_right = true;
  std::uint64_t calls = 0;
  for (std::uint64_t i = 0; i < arguments.seeds; ++i, ++scenario.seed) {
    calm.seed = scenario.seed;
    if (scenario.killed == 0 || calls == 0) {
      const double before = seconds_used();
      const Report report = run(calm);
      const std::string problem = problem_of(calm, report);
      for (const RankReport& rank : report.ranks) calls = std::max(calls, rank.calls);
      std::printf("%d ranks, wide from %d on, %s, seed %" PRIu64 ": digest %016" PRIx64 ", %" PRIu64
                  " switches, %.1f s of processor time, %.2f GB\n",
                  ranks, scenario.wide_min_ranks, scenario.has_tcp_store ? "TcpStore" : "a store without sockets",
                  calm.seed, report.digest, report.switches, seconds_used() - before, most_gb());
      if (problem.empty()) {
        print_counts(report);
      } else {
        std::printf("FAILED with --seed %" PRIu64 ": %s\n", calm.seed, problem.c_str());
        is_right = false;
      }
    }
    if (scenario.killed == 0) continue;
    scenario.kill_within_calls = calls;
    is_right &= run_one(scenario, arguments.seeds == 1);
  }
  return is_right;
}

bool is_told(bool holds, const char* what) {
  if (!holds) std::printf("FAILED: %s\n", what);
  return holds;
}

// Two threads that take two locks in different order: some seeds let them wait for each other, which is told, some not.
bool finds_a_deadlock() {
  std::map<Scheduler::End, int> ends;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Scheduler scheduler(seed, 2);
    Network network{{}};
    Process& process = scheduler.make_process();
    std::mutex one, other;
    int open = 2;
    const auto take = [&open](std::mutex& first, std::mutex& second) {
      const std::scoped_lock outer(first);
      const std::scoped_lock inner(second);
      --open;
    };
    scheduler.start(process, [&] { take(one, other); });
    scheduler.start(process, [&] { take(other, one); });
    ++ends[scheduler.run(open, never)];
  }
  return ends[Scheduler::End::deadlock] > 0 && ends[Scheduler::End::over] > 0;
}

// What a test of seconds can see: a mesh and a wide group come up and compute, a seed replays, survivors of deaths say
// who is lost.
bool check() {
  constexpr std::uint64_t seeds_of_operations = 6, seeds_of_deaths = 12;
  bool is_right = is_told(finds_a_deadlock(), "a deadlock is not found");
  Scenario mesh, wide;
  mesh.ranks = 32;
  mesh.is_strict = wide.is_strict = true;
  wide.ranks = 64;
  wide.wide_min_ranks = 2;
  for (Scenario scenario : {mesh, wide}) {
    std::array<std::uint64_t, 3> digests{};
    for (std::size_t i = 0; i < digests.size(); ++i) {
      scenario.seed = i == 2 ? 2 : 1;
      const Report report = run(scenario);
      const std::string problem = problem_of(scenario, report);
      is_right &= is_told(problem.empty(), problem.c_str());
      digests[i] = report.digest;
      for (const RankReport& rank : report.ranks)
        scenario.kill_within_calls = std::max(scenario.kill_within_calls, rank.calls);
    }
    is_right &= is_told(digests[0] == digests[1], "the same seed runs otherwise");
    is_right &= is_told(digests[0] != digests[2], "another seed runs the same");
    scenario.paths.slow_of_1000 = 5;
    Scenario busy = scenario;
    busy.ranks = 11;
    busy.operations = 8;
    for (busy.seed = 1; busy.seed <= seeds_of_operations; ++busy.seed) is_right &= run_one(busy, false);
    scenario.killed = 1;
    for (scenario.seed = 1; scenario.seed <= seeds_of_deaths; ++scenario.seed) {
      scenario.kills_hosts = scenario.seed % 3 == 0;
      is_right &= run_one(scenario, false);
    }
  }
  std::printf("simulation: %s\n", is_right ? "all checks passed" : "FAILED");
  return is_right;
}

std::uint64_t number(const std::string& text) {
  char* end = nullptr;
  const std::uint64_t result = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') {
    std::fprintf(stderr, "'%s' is no number\n%s", text.c_str(), usage);
    std::exit(2);
  }
  return result;
}

Arguments parse(int count, char** texts) {
  Arguments result;
  for (int i = 1; i < count; ++i) {
    const std::string name = texts[i];
    const std::map<std::string, bool*> flags = {{"--check", &result.is_check},
                                                {"--strict", &result.scenario.is_strict},
                                                {"--hosts", &result.scenario.kills_hosts},
                                                {"--agree-on-nics", &result.scenario.agrees_on_nics}};
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = true;
      continue;
    }
    const std::string value = i + 1 < count ? texts[++i] : "";
    if (name == "--ranks") {
      result.ranks.clear();
      for (std::size_t begin = 0; begin <= value.size();) {
        const std::size_t end = std::min(value.find(',', begin), value.size());
        result.ranks.push_back(static_cast<int>(number(value.substr(begin, end - begin))));
        begin = end + 1;
      }
    } else if (name == "--wide-min-ranks") {
      result.scenario.wide_min_ranks = static_cast<int>(number(value));
    } else if (name == "--seed") {
      result.scenario.seed = number(value);
    } else if (name == "--seeds") {
      result.seeds = number(value);
    } else if (name == "--kill") {
      result.scenario.killed = static_cast<int>(number(value));
    } else if (name == "--operations") {
      result.scenario.operations = static_cast<int>(number(value));
    } else if (name == "--slow") {
      result.scenario.paths.slow_of_1000 = static_cast<unsigned>(number(value));
    } else if (name == "--connect-timeout") {
      result.scenario.connect_timeout = static_cast<Time>(number(value)) * second;
    } else if (name == "--store") {
      result.store = value;
    } else {
      std::fprintf(stderr, "'%s' is no argument\n%s", name.c_str(), usage);
      std::exit(2);
    }
  }
  return result;
}

}  // namespace

int main(int count, char** texts) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  ::setenv("HOLMES_FLIGHT_RECORDER", "0", 1);
  ::setenv("HOLMES_SPIN_US", "0", 1);
  ::setenv("HOLMES_LOG", "error", 0);  // who is killed leaves many lines
  const Arguments arguments = parse(count, texts);
  bool is_right = !arguments.is_check || check();
  for (const int ranks : arguments.is_check ? std::vector<int>{} : arguments.ranks)
    is_right &= run_seeds(arguments, ranks);
  std::fflush(stdout);
  std::_Exit(is_right ? 0 : 1);  // threads that the library never ends hold what it would take down
}
