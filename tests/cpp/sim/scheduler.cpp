#include "sim/scheduler.hpp"

#include <cxxabi.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sim/process_image.hpp"

namespace holmes::sim {
namespace {

constexpr std::size_t stack_bytes = 256 << 10;  // touched where used
constexpr std::uint64_t canary = 0x686f6c6d65732121;
constexpr std::uint64_t most_switches_at_once = 10'000;  // of one fiber, in one instant, on average

Fiber* running = nullptr;
Scheduler* the_scheduler = nullptr;

[[noreturn]] void give_up(const char* what) {
  std::fprintf(stderr, "simulation: %s\n", what);
  std::abort();
}

// The library's variables as they are when a process begins.
const std::vector<std::byte>& first_image() {
  static const std::vector<std::byte> image(library_memory().variables.begin(), library_memory().variables.end());
  return image;
}

const std::vector<std::byte>& first_thread_image() {
  static const std::vector<std::byte> image(library_memory().thread_variables.begin(),
                                            library_memory().thread_variables.end());
  return image;
}

void copy(std::span<const std::byte> from, std::span<std::byte> to) { std::memcpy(to.data(), from.data(), to.size()); }

std::byte* handled_exceptions() { return reinterpret_cast<std::byte*>(__cxxabiv1::__cxa_get_globals()); }

}  // namespace

Fiber* current_fiber() { return running; }
Scheduler& scheduler() { return *the_scheduler; }

Scheduler::Scheduler(std::uint64_t seed, std::size_t threads) : stacks_bytes_(threads * stack_bytes) {
  the_scheduler = this;
  first_image();
  first_thread_image();
  for (std::uint64_t& word : state_) {  // splitmix64
    std::uint64_t mixed = seed += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    word = mixed ^ mixed >> 31;
  }
  void* const memory = ::mmap(nullptr, stacks_bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) give_up("no address space for the stacks");
  ::madvise(memory, stacks_bytes_, MADV_NOHUGEPAGE);
  stacks_ = static_cast<char*>(memory);
}

Scheduler::~Scheduler() {
  copy(first_image(), library_memory().variables);
  copy(first_thread_image(), library_memory().thread_variables);
  ::munmap(stacks_, stacks_bytes_);
  the_scheduler = nullptr;
}

// xoshiro256**
std::uint64_t Scheduler::random() {
  const auto turned = [](std::uint64_t word, int by) { return word << by | word >> (64 - by); };
  const std::uint64_t result = turned(state_[1] * 5, 7) * 9, shifted = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= shifted;
  state_[3] = turned(state_[3], 45);
  return result;
}

Process& Scheduler::make_process() {
  auto& process = *processes_.emplace_back(std::make_unique<Process>());
  process.number = static_cast<int>(processes_.size()) - 1;
  process.variables = first_image();
  return process;
}

void Scheduler::take_stack(Fiber& fiber) {
  if (free_stacks_.empty()) {
    if (stacks_used_ == stacks_bytes_) give_up("more threads than there is room for");
    fiber.stack = stacks_ + stacks_used_;
    stacks_used_ += stack_bytes;
  } else {
    fiber.stack = free_stacks_.back();
    free_stacks_.pop_back();
  }
  std::memcpy(fiber.stack, &canary, sizeof canary);
}

Fiber& Scheduler::start(Process& process, std::function<void()> body) {
  Fiber& fiber = fibers_.emplace_back();
  fiber.process = &process;
  fiber.number = static_cast<std::uint32_t>(fibers_.size());
  fiber.body = std::move(body);
  fiber.variables = first_thread_image();
  take_stack(fiber);
  ::getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = stack_bytes;
  fiber.context.uc_link = nullptr;
  ::makecontext(&fiber.context, &Scheduler::enter, 0);
  ready_.push_back(&fiber);
  return fiber;
}

void Scheduler::enter() {
  Fiber& own = *running;
  own.body();
  own.body = nullptr;
  own.state = Fiber::State::ended;
  if (own.joined_by) the_scheduler->wake(*own.joined_by);
  the_scheduler->leave();
}

void Scheduler::leave() { ::swapcontext(&running->context, &outside_); }

void Scheduler::end_process() {
  Process& process = *running->process;
  process.is_dead = true;
  if (process.on_death) process.on_death();
  leave();
  give_up("a fiber of a dead process goes on");
}

void Scheduler::load(Process& process) {
  if (loaded_ == &process) return;
  if (loaded_) copy(library_memory().variables, loaded_->variables);
  copy(process.variables, library_memory().variables);
  loaded_ = &process;
}

void Scheduler::resume(Fiber& fiber) {
  if (fiber.process->is_dead) return;
  ++switches_;
  note(fiber.number);
  load(*fiber.process);
  copy(fiber.variables, library_memory().thread_variables);
  std::memcpy(handled_exceptions(), fiber.exceptions.data(), fiber.exceptions.size());
  running = &fiber;
  errno = fiber.error_number;
  ::swapcontext(&outside_, &fiber.context);
  fiber.error_number = errno;
  running = nullptr;
  std::memcpy(fiber.exceptions.data(), handled_exceptions(), fiber.exceptions.size());
  copy(library_memory().thread_variables, fiber.variables);
  if (std::memcmp(fiber.stack, &canary, sizeof canary) != 0) give_up("a stack was too small");
  if (fiber.state == Fiber::State::ended) free_stacks_.push_back(fiber.stack);
}

Scheduler::End Scheduler::run(const int& open, Time limit) {
  while (open > 0) {
    if (!ready_.empty()) {
      if (++switches_at_now_ > most_switches_at_once * (fibers_.size() + 100)) return End::livelock;
      std::swap(ready_[below(ready_.size())], ready_.back());
      Fiber& next = *ready_.back();
      ready_.pop_back();
      resume(next);
      continue;
    }
    if (events_.empty()) return End::deadlock;
    if (events_.top().time > limit) return End::too_late;
    if (events_.top().time > now_) switches_at_now_ = 0;
    now_ = std::max(now_, events_.top().time);
    while (!events_.empty() && events_.top().time <= now_) {
      const Event event = events_.top();
      events_.pop();
      note(static_cast<std::uint64_t>(event.time) ^ event.argument << 20);
      event.action(event.argument);
    }
  }
  return End::over;
}

// Of what happens in one instant any may be the first.
void Scheduler::at(Time time, Action action, std::uint64_t argument) {
  events_.push({time, random(), action, argument});
}

// One event for a fiber, which looks again where the fiber waits for longer by now: most waits end before their time.
void Scheduler::look_at_timer(std::uint64_t number) {
  Fiber& fiber = the_scheduler->fibers_[number - 1];
  fiber.timer_at = never;
  if (fiber.state != Fiber::State::blocked || fiber.until == never) return;
  if (fiber.until > the_scheduler->now_) {
    fiber.timer_at = fiber.until;
    return the_scheduler->at(fiber.until, look_at_timer, number);
  }
  fiber.state = Fiber::State::ready;
  the_scheduler->ready_.push_back(&fiber);
}

bool Scheduler::block(Time until) {
  Fiber& own = *running;
  own.state = Fiber::State::blocked;
  own.was_woken = false;
  own.until = until;
  ++own.waits;
  if (until < own.timer_at) {
    own.timer_at = until;
    at(std::max(until, now_), look_at_timer, own.number);
  }
  leave();
  return own.was_woken;
}

void Scheduler::yield() {
  ready_.push_back(running);
  leave();
}

void Scheduler::wake(Fiber& fiber) {
  if (fiber.state != Fiber::State::blocked) return;
  fiber.state = Fiber::State::ready;
  fiber.was_woken = true;
  ready_.push_back(&fiber);
}

bool Scheduler::wait_at(const void* address, Time until) {
  Fiber* const own = running;
  const Place place{own->process, address};
  waiting_[place].push_back(own);
  if (block(until)) return true;
  const auto found = waiting_.find(place);
  if (found == waiting_.end()) return false;
  std::erase(found->second, own);
  if (found->second.empty()) waiting_.erase(found);
  return false;
}

void Scheduler::wake_one_at(const void* address) {
  const auto found = waiting_.find({running->process, address});
  if (found == waiting_.end()) return;
  auto& fibers = found->second;
  std::swap(fibers[below(fibers.size())], fibers.back());
  if (fibers.back()->state == Fiber::State::blocked)
    wake(*fibers.back());
  else
    fibers.back()->was_woken = true;  // its time has come too
  fibers.pop_back();
  if (fibers.empty()) waiting_.erase(found);
}

void Scheduler::wake_all_at(const void* address) {
  const auto found = waiting_.find({running->process, address});
  if (found == waiting_.end()) return;
  const auto fibers = std::move(found->second);
  waiting_.erase(found);
  for (Fiber* const fiber : fibers) wake(*fiber);
}

}  // namespace holmes::sim
