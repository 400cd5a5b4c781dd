#include "sim/scenario.hpp"

#include <arpa/inet.h>

#include <csignal>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <stdexcept>

#include "collective_checks.hpp"
#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/comm/communicator.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "sim/store.hpp"

namespace holmes::sim {
namespace {

constexpr std::uint16_t store_port = 29500;
constexpr std::size_t threads_of_a_rank = 4;
constexpr std::size_t most_threads_told = 40;
// Row and column have the deadline one after the other; behind each, ranks wait a little for what the others say.
constexpr Time grace = 10 * second;

std::string text_of(in_addr_t address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET, &address, text.data(), text.size());
  return text.data();
}

class Run {
public:
  explicit Run(const Scenario& scenario)
      : scenario_(scenario),
        scheduler_(scenario.seed, threads_of_a_rank * static_cast<std::size_t>(scenario.ranks) + 16),
        network_(scenario.paths),
        open_(scenario.ranks) {
    report_.ranks.resize(static_cast<std::size_t>(scenario.ranks));
  }

  Report run() {
    for (int rank = 0; rank < scenario_.ranks; ++rank) add_rank(rank);
    for (int i = 0; i < scenario_.killed; ++i) choose_victim();
    Process& server = scheduler_.make_process();
    scheduler_.start(server, [this] { serve(); });
    report_.end = scheduler_.run(open_, start_time + 20 * (scenario_.connect_timeout + grace));
    for (RankReport& rank : report_.ranks) judge(rank);
    report_.digest = scheduler_.digest();
    report_.misuses = network_.misuses();
    report_.switches = scheduler_.switches();
    if (report_.end != Scheduler::End::over) report_.where_it_stands = where_threads_are();
    return std::move(report_);
  }

private:
  RankReport& report(int rank) { return report_.ranks[static_cast<std::size_t>(rank)]; }

  void add_rank(int rank) {
    Process& process = scheduler_.make_process();
    process.on_death = [this, rank] {
      report(rank).is_killed = true;
      --open_;
    };
    scheduler_.start(process, [this, rank, &process] {
      RankReport& own = report(rank);
      scheduler_.block(scheduler_.now() +
                       static_cast<Time>(scheduler_.below(static_cast<std::uint64_t>(scenario_.starts_within) + 1)));
      own.began = scheduler_.now();
      try {
        take_part(rank);
      } catch (const HolmesError& error) {
        own.problem = error.what();
      } catch (const std::exception& error) {
        own.problem = std::string("not of Holmes: ") + error.what();
      }
      own.ended = scheduler_.now();
      own.has_ended = true;
      own.calls = process.calls;
      process.on_death = nullptr;
      --open_;
    });
  }

  void choose_victim() {
    Process& victim = *scheduler_.processes()[scheduler_.below(static_cast<std::uint64_t>(scenario_.ranks))];
    victim.dies_at_call = 1 + scheduler_.below(scenario_.kill_within_calls);
    victim.dies_silently = scenario_.kills_hosts;
  }

  void serve() {
    if (!scenario_.has_tcp_store) return;
    const TcpStore store(text_of(Network::address_of(scenario_.ranks)), store_port, true);
    scheduler_.block(never);
  }

  std::shared_ptr<Store> store_of_rank() {
    if (scenario_.has_tcp_store)
      return std::make_shared<TcpStore>(text_of(Network::address_of(scenario_.ranks)), store_port, false);
    return std::make_shared<SimulatedStore>(stored_, 2 * scenario_.paths.latency);
  }

  void take_part(int rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = scenario_.ranks;
    if (!scenario_.agrees_on_nics) options.nics = {{nic_name, text_of(Network::address_of(rank))}};
    options.transport = Transport::tcp;
    options.wide_min_ranks = scenario_.wide_min_ranks;
    options.connect_timeout = options.timeout = Duration(scenario_.connect_timeout);
    const auto comm = make_communicator(store_of_rank(), options);
    RankReport& own = report(rank);
    own.set_up = scheduler_.now();
    own.traffic[0] = network_.traffic(rank);
    own.at[0] = own.set_up;
    for (std::size_t stage = 1; stage < stages; ++stage) {
      add_up(*comm);
      own.traffic[stage] = network_.traffic(rank);
      own.at[stage] = scheduler_.now();
    }
    for (int i = 0; i < scenario_.operations; ++i) operate(*comm, i);
    comm->barrier({})->wait();
  }

  // The same on every rank.
  void operate(Communicator& comm, int number) const {
    std::mt19937_64 choice(scenario_.seed * 1'000'003 + static_cast<std::uint64_t>(number));
    constexpr std::array<std::size_t, 5> counts = {1, 100, 3000, 20'000, 70'000};
    const std::size_t count = counts[choice() % counts.size()];
    const auto root = static_cast<int>(choice() % static_cast<std::uint64_t>(comm.size()));
    const bool is_wide = comm.size() >= scenario_.wide_min_ranks;
    switch (choice() % 7) {
      case 0:
        return test::check_all_reduce(comm, count);
      case 1:
        return test::check_reduce_scatter(comm, count / 64);
      case 2:
        return test::check_all_gather(comm, count / 64);
      case 3:
        return test::check_rooted(comm, count / 64, root);
      case 4:
        return test::check_all_to_all(comm, count / 64);
      case 5:
        if (is_wide) return test::check_async(comm, count);
        test::check_p2p(comm, count);
        return comm.barrier({})->wait();  // before others send to any of the next one's receives
      default:
        return test::check_split(comm);
    }
  }

  void add_up(Communicator& comm) const {
    std::int64_t sum = comm.rank() + 1;
    comm.all_reduce({&sum, 1, DType::int64, nullptr}, ReduceOp::sum, {})->wait();
    const std::int64_t size = comm.size();
    if (sum != size * (size + 1) / 2) throw std::logic_error("the sum is wrong: " + std::to_string(sum));
  }

  // What the error says: "rank 3", "ranks 3, 17"; or "(host n3)", where a part has numbers of its own.
  void judge(RankReport& rank) const {
    static const std::regex named("ranks? (\\d+(, \\d+)*)|host n(\\d+)"), number("\\d+");
    const std::string& text = rank.problem;
    const bool has_own_numbers = text.find("/split") != std::string::npos;
    for (std::sregex_iterator names(text.begin(), text.end(), named), end; names != end; ++names) {
      const std::string numbers = names->str();
      const bool is_host = names->str(3) != "";
      for (std::sregex_iterator one(numbers.begin(), numbers.end(), number); one != end; ++one) {
        const auto index = std::stoul(one->str());
        rank.names_a_rank |= !is_host;
        rank.names_a_lost_rank |= index < report_.ranks.size() && report_.ranks[index].is_killed;
      }
    }
    rank.names_a_lost_rank |= rank.names_a_rank && has_own_numbers;
  }

  std::string where_threads_are() const {
    std::map<std::string, int> calls;
    std::string text;
    std::size_t told = 0;
    for (const Fiber& fiber : scheduler_.fibers()) {
      if (fiber.state == Fiber::State::ended || fiber.process->is_dead) continue;
      const bool has_limit = fiber.state == Fiber::State::blocked && fiber.until != never;
      ++calls[std::string(fiber.last_call) + (has_limit ? ", for a time" : "")];
      if (told++ < most_threads_told)
        text += "process " + std::to_string(fiber.process->number) + ", thread " + std::to_string(fiber.number) +
                ": in " + fiber.last_call + (has_limit ? ", for a time" : "") + "\n";
    }
    for (const auto& [call, count] : calls) text += std::to_string(count) + " threads in " + call + "\n";
    return text;
  }

  const Scenario scenario_;
  Scheduler scheduler_;
  Network network_;
  int open_;
  Report report_;
  std::shared_ptr<StoredValues> stored_ = std::make_shared<StoredValues>();
};

}  // namespace

Report run(const Scenario& scenario) {
  static std::uint64_t seed = 0;
  seed = scenario.seed;
  std::signal(SIGABRT, [](int) { std::fprintf(stderr, "with --seed %llu\n", static_cast<unsigned long long>(seed)); });
  [[maybe_unused]] static const Env read_once = Env::read();  // its tables are made once and not for each rank
  return Run(scenario).run();
}

std::string problem_of(const Scenario& scenario, const Report& report) {
  switch (report.end) {
    case Scheduler::End::over:
      break;
    case Scheduler::End::deadlock:
      return "nobody can go on any more\n" + report.where_it_stands;
    case Scheduler::End::too_late:
      return "ranks are not done long after every deadline\n" + report.where_it_stands;
    case Scheduler::End::livelock:
      return "threads run in turns and time does not go on\n" + report.where_it_stands;
  }
  if (report.misuses > 0) return std::to_string(report.misuses) + " uses of descriptors that are not open";
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    const RankReport& one = report.ranks[rank];
    const std::string who = "rank " + std::to_string(rank);
    if (one.is_killed) continue;
    if (!one.problem.empty() && scenario.killed == 0) return who + " fails where nobody was killed: " + one.problem;
    if (!one.problem.empty() && !one.names_a_rank) return who + " raises an error that names no rank: " + one.problem;
    if (!one.problem.empty() && !one.names_a_lost_rank && scenario.is_strict)
      return who + " raises an error that does not name who was killed: " + one.problem;
    if (one.ended - one.began > 2 * scenario.connect_timeout + grace)
      return who + " ends only after " + std::to_string((one.ended - one.began) / second) + " s: " + one.problem;
  }
  return "";
}

}  // namespace holmes::sim
