#include "fibers.hpp"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define UNSEEN __attribute__((no_sanitize_thread, noinline))
#else
#define UNSEEN
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace on_host {
namespace {

constexpr std::size_t stack_bytes = 64 << 10;

void say_arrived([[maybe_unused]] void* at) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(at);
#endif
}
void see_arrived([[maybe_unused]] void* at) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(at);
#endif
}

struct Barrier {
  unsigned members = 0, arrived = 0;
  unsigned long turn = 0;
};

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(stack_bytes);
  bool has_ended = true;
#if defined(__SANITIZE_THREAD__)
  void* thread = __tsan_create_fiber(0);
  ~Fiber() { __tsan_destroy_fiber(thread); }
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
#endif
};

// All of it is the scheduler's, which runs one fiber at a time: the thread sanitizer does not look at it (UNSEEN).
struct State {
  std::vector<std::unique_ptr<Fiber>> fibers;
  unsigned blocks = 0, threads = 0, block = 0, current = 0;
  const std::function<void()>* body = nullptr;
  Barrier of_block;
  std::vector<Barrier> of_warps;
  std::vector<double> slots;
  // For fibers, which look at no container: its functions are not UNSEEN.
  Fiber* running = nullptr;
  Barrier* warp_barriers = nullptr;
  double* places = nullptr;
  unsigned long moves = 0;  // arrivals and ends
  ucontext_t scheduler{};
  char begin = 0, end = 0;  // addresses: of the launch and of what comes behind it
#if defined(__SANITIZE_THREAD__)
  void* scheduler_thread = nullptr;
#endif
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_stack = nullptr;
  std::size_t scheduler_bytes = 0;
  void* fake_stack = nullptr;
#endif
};
State* state = nullptr;  // of the launch that runs

UNSEEN Fiber& own() { return *state->running; }

// From a fiber to the scheduler.
UNSEEN void leave(bool for_good) {
  Fiber& fiber = own();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, state->scheduler_stack,
                                 state->scheduler_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(state->scheduler_thread, __tsan_switch_to_fiber_no_sync);
#endif
  (void)for_good;
  swapcontext(&fiber.context, &state->scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
#endif
}

UNSEEN void begin_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &state->scheduler_stack, &state->scheduler_bytes);
#endif
  see_arrived(&state->begin);
  see_arrived(&state->end);  // of the blocks before: "shared" memory is theirs first
  (*state->body)();
  say_arrived(&state->end);
  own().has_ended = true;
  ++state->moves;
  leave(true);
}

UNSEEN void enter(unsigned number) {
  state->current = number;
  Fiber& fiber = *(state->running = state->fibers[number].get());
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&state->fake_stack, fiber.stack.get(), stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.thread, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&state->scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(state->fake_stack, nullptr, nullptr);
#endif
}

UNSEEN void meet(Barrier& barrier) {
  const unsigned long turn = barrier.turn;
  say_arrived(&barrier);
  ++state->moves;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
  }
  while (barrier.turn == turn) leave(false);
  see_arrived(&barrier);
}

UNSEEN void run_block() {
  State& all = *state;
  all.of_block = {all.threads, 0, 0};
  for (unsigned warp = 0; warp < all.of_warps.size(); ++warp)
    all.of_warps[warp] = {std::min(warp_threads, all.threads - warp * warp_threads), 0, 0};
  for (auto& fiber : all.fibers) {
    fiber->has_ended = false;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = stack_bytes;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, begin_fiber, 0);
  }
  for (bool is_open = true; is_open;) {
    is_open = false;
    const unsigned long before = all.moves;
    for (unsigned number = 0; number < all.threads; ++number) {
      if (all.fibers[number]->has_ended) continue;
      is_open = true;
      enter(number);
    }
    if (is_open && all.moves == before) {
      std::fprintf(stderr, "a thread of block %u has ended while others wait for it at a barrier\n", all.block);
      std::abort();
    }
  }
}

}  // namespace

UNSEEN Index this_thread() { return {state->current}; }
UNSEEN Index this_block() { return {state->block}; }
UNSEEN Index this_grid() { return {state->blocks}; }
UNSEEN void meet_block() { meet(state->of_block); }
UNSEEN void meet_warp() { meet(state->warp_barriers[state->current / warp_threads]); }
UNSEEN void* slot_of(unsigned lane) { return &state->places[state->current / warp_threads * warp_threads + lane]; }

UNSEEN void launch(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  State all;
  all.blocks = blocks;
  all.threads = threads;
  all.body = &body;
  all.of_warps.resize((threads + warp_threads - 1) / warp_threads);
  all.slots.resize(all.of_warps.size() * warp_threads);
  for (unsigned i = 0; i < threads; ++i) all.fibers.push_back(std::make_unique<Fiber>());
#if defined(__SANITIZE_THREAD__)
  all.scheduler_thread = __tsan_get_current_fiber();
#endif
  all.warp_barriers = all.of_warps.data();
  all.places = all.slots.data();
  state = &all;
  say_arrived(&all.begin);
  for (all.block = 0; all.block < blocks; ++all.block) run_block();
  see_arrived(&all.end);
  state = nullptr;
}

}  // namespace on_host
