// Scheduler: the threads of many processes as fibers of one thread, in virtual time. Whatever could go one way or
// another goes as the seed says: a run is the same each time.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <unordered_map>
#include <vector>

namespace holmes::sim {

using Time = std::int64_t;  // virtual nanoseconds
inline constexpr Time never = INT64_MAX;
inline constexpr Time microsecond = 1000, millisecond = 1000 * microsecond, second = 1000 * millisecond;
inline constexpr Time start_time = 1000 * second;

struct Process {
  int number = 0;
  std::vector<std::byte> variables;  // the library's, while another process runs
  std::uint64_t calls = 0;           // of the system
  std::uint64_t dies_at_call = 0;    // 0: it does not
  bool dies_silently = false;        // its host does: nobody tells its peers
  bool is_dead = false;
  std::function<void()> on_death{};
};

struct Fiber {
  enum class State { ready, blocked, ended };

  Process* process = nullptr;
  std::uint32_t number = 0;
  std::function<void()> body{};
  State state = State::ready;
  Time until = never;       // blocked: at the longest
  Time timer_at = never;    // when an event looks whether that time has come
  bool was_woken = false;   // else its time came
  std::uint64_t waits = 0;  // how often it has been blocked
  const char* last_call = "its begin";
  Fiber* joined_by = nullptr;
  // What the thread has of its own, while another one runs.
  ucontext_t context{};
  char* stack = nullptr;
  int error_number = 0;
  std::array<std::byte, 16> exceptions{};  // being handled
  std::vector<std::byte> variables{};      // the library's
};

class Scheduler {
public:
  enum class End { over, deadlock, too_late, livelock };
  using Action = void (*)(std::uint64_t argument);

  // `threads`: at most so many fibers at once.
  Scheduler(std::uint64_t seed, std::size_t threads);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // --- the world ---
  Process& make_process();
  Fiber& start(Process& process, std::function<void()> body);
  // Until `open` is 0, nothing can happen any more, or it is later than `limit`.
  End run(const int& open, Time limit);
  Time now() const { return now_; }
  std::uint64_t random();
  std::uint64_t below(std::uint64_t bound) { return random() % bound; }
  // Calls `action(argument)` then, outside of all fibers.
  void at(Time time, Action action, std::uint64_t argument);
  // Of all that happened and when.
  std::uint64_t digest() const { return digest_; }
  void note(std::uint64_t happened) { digest_ = (digest_ ^ happened) * 1099511628211u; }
  const std::vector<std::unique_ptr<Process>>& processes() const { return processes_; }
  const std::deque<Fiber>& fibers() const { return fibers_; }
  std::uint64_t switches() const { return switches_; }

  // --- in a fiber ---
  // Returns false where `until` came first.
  bool block(Time until);
  void yield();
  // The process of the running fiber ends: none of its fibers runs any more.
  [[noreturn]] void end_process();
  // What is at this address of the running process: a mutex, a condition.
  bool wait_at(const void* address, Time until);
  void wake_one_at(const void* address);
  void wake_all_at(const void* address);

  // --- anywhere ---
  void wake(Fiber& fiber);

private:
  struct Event {
    Time time;
    std::uint64_t order;
    Action action;
    std::uint64_t argument;
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
  };
  struct Place {
    const Process* process;
    const void* address;
    bool operator==(const Place&) const = default;
  };
  struct PlaceHash {
    std::size_t operator()(const Place& place) const {
      return reinterpret_cast<std::uintptr_t>(place.address) * 31 + static_cast<std::size_t>(place.process->number);
    }
  };

  static void enter();
  static void look_at_timer(std::uint64_t fiber);
  void resume(Fiber& fiber);
  void leave();
  void load(Process& process);
  void take_stack(Fiber& fiber);

  Time now_ = start_time;
  std::uint64_t state_[4];
  std::uint64_t digest_ = 14695981039346656037u;
  std::uint64_t switches_ = 0, switches_at_now_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::deque<Fiber> fibers_;
  std::vector<Fiber*> ready_;
  std::vector<std::unique_ptr<Process>> processes_;
  Process* loaded_ = nullptr;
  std::unordered_map<Place, std::deque<Fiber*>, PlaceHash> waiting_;
  ucontext_t outside_{};
  char* stacks_ = nullptr;
  std::size_t stacks_bytes_ = 0, stacks_used_ = 0;
  std::vector<char*> free_stacks_;
};

// The running one; null outside of all.
Fiber* current_fiber();
// The one that there is.
Scheduler& scheduler();

}  // namespace holmes::sim
