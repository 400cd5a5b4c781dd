#include "holmes/engine/operations.hpp"

#include <algorithm>
#include <iterator>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

// As reserve, but many small steps take no more time than a large one.
template <typename Element>
void make_room(std::vector<Element>& elements, std::size_t more) {
  const std::size_t needed = elements.size() + more;
  if (needed > elements.capacity()) elements.reserve(std::max(needed, 2 * elements.capacity()));
}

}  // namespace

Operations::Operations(Group& group, std::vector<std::unique_ptr<Channel>> p2p_channels, int wake_fd)
    : group_(group), p2p_(group, std::move(p2p_channels), wake_fd), owed_(group) {}

bool Operations::submit(std::unique_ptr<Collective>& collective) {
  std::lock_guard lock(mutex_);
  if (is_closed_) return false;
  make_room(new_, 1);
  collective->set_sequence(next_sequence_++);
  record_call(*collective, WorkState::queued);
  new_.emplace_back(std::move(collective));
  has_new_.store(true, std::memory_order_release);
  return true;
}

bool Operations::submit(std::vector<P2pEngine::Request>& requests) {
  std::lock_guard lock(mutex_);
  if (is_closed_) return false;
  make_room(new_, requests.size());
  for (auto& request : requests) {
    record_call(request);
    new_.emplace_back(std::move(request));
  }
  has_new_.store(true, std::memory_order_release);
  return true;
}

bool Operations::submit_own(std::unique_ptr<Collective>& collective) {
  std::lock_guard lock(mutex_);
  if (is_closed_ || has_new_.load(std::memory_order_relaxed)) return false;
  const WorkState state = queue_.empty() ? WorkState::running : WorkState::queued;
  queue_.push_back(std::move(collective));  // it may throw, and then nothing was called
  queue_.back()->set_sequence(next_sequence_++);
  record_call(*queue_.back(), state);
  taken_.fetch_add(1);
  return true;
}

// What others do not wait for comes after what goes to them: theirs is on its way meanwhile.
Operations::ShortBegin Operations::begin_short(ShortCall& called, Duration timeout) {
  if (!called.has_room()) return {};
  if (group_.local_completion) owed_.reserve();
  std::lock_guard lock(mutex_);
  if (is_closed_ || has_new_.load(std::memory_order_relaxed)) return {};
  called.signature().sequence = next_sequence_++;
  const bool all_gone = called.send();
  const auto submitted = clock_.now();
  if (called.keeps_any()) group_.keep_until(submitted + timeout);
  group_.keeps_payload |= called.keeps_payload();
  return {true, all_gone, submitted,
          group_.recorder->add(holmes::recorded_call(called.signature()), WorkState::running, submitted)};
}

ShortState Operations::catch_up() {
  owed_.receive();
  return owed_.has_much_room() ? ShortState::ready : ShortState::awaited;
}

ShortState Operations::take_short(ShortCall& called, std::uint64_t record, Clock::time_point deadline) {
  if (const ShortState state = called.take(); state != ShortState::ready) {
    owed_.receive();
    return state;
  }
  if (called.append_owed(owed_, deadline)) owed_.added();
  last_end_ = clock_.now();
  group_.recorder->finish(record, true, last_end_);
  return ShortState::ready;
}

void Operations::go_on(std::unique_ptr<Collective> collective, const ShortCall& called, std::uint64_t record) {
  collective->set_gone(called.gone_bytes());
  collective->set_sequence(called.signature().sequence);
  collective->set_record(record);
  queue_.push_back(std::move(collective));
  taken_.fetch_add(1);
}

ShortState Operations::carry_short(const ShortMessage& message, Clock::time_point submitted, Duration timeout) {
  if (const ShortState state = p2p_.state_of(message); state != ShortState::ready) return state;
  std::uint64_t record = 0;
  {
    std::lock_guard lock(mutex_);
    if (is_closed_ || has_new_.load(std::memory_order_relaxed)) return ShortState::barred;
    const std::size_t before = p2p_.pending();
    if (!p2p_.carry(message, submitted + timeout)) return ShortState::barred;
    taken_.fetch_add(static_cast<int>(p2p_.pending() - before));
    record = group_.recorder->add({.op = message.is_send ? OpCode::send : OpCode::recv,
                                   .dtype = message.dtype,
                                   .peer = message.peer,
                                   .sequence = next_p2p_++,
                                   .tag = message.tag,
                                   .count = message.bytes / size_bytes(message.dtype)},
                                  WorkState::running, submitted);
  }
  group_.recorder->finish(record, true, clock_.now());
  return ShortState::ready;
}

const std::shared_ptr<Work>& Operations::completed(int source) {
  const auto at = static_cast<std::size_t>(source + 1);
  if (completed_.size() <= at) completed_.resize(at + 1);
  std::shared_ptr<Work>& work = completed_[at];
  if (!work) work = completed_work(source);
  return work;
}

void Operations::record_call(Collective& collective, WorkState state) {
  collective.set_record(group_.recorder->add(collective.recorded_call(), state, collective.work().submitted()));
}

void Operations::record_call(P2pEngine::Request& request) {
  if (request.tag == internal_tag) return;
  request.sequence = next_p2p_++;
  request.record = group_.recorder->add(request.recorded_call(), WorkState::running, request.work->submitted());
}

std::uint64_t Operations::entered() const {
  std::lock_guard lock(mutex_);
  return next_sequence_;
}

void Operations::take_new() {
  {
    std::lock_guard lock(mutex_);
    taking_.swap(new_);
    taken_.fetch_add(static_cast<int>(taking_.size()));
    has_new_.store(false, std::memory_order_release);
  }
  for (auto next = taking_.begin(); next != taking_.end(); ++next) {
    auto* collective = std::get_if<std::unique_ptr<Collective>>(&*next);
    auto* request = std::get_if<P2pEngine::Request>(&*next);
    const auto work = request ? request->work : nullptr;
    const std::uint64_t record = request ? request->record : 0;
    try {
      if (collective) {
        queue_.push_back(std::move(*collective));
        continue;
      }
      const std::size_t before = p2p_.pending();
      p2p_.submit(std::move(*request));
      // A receive may find its message waiting and be finished at once.
      taken_.fetch_sub(static_cast<int>(before + 1 - p2p_.pending()));
    } catch (...) {
      // What was not taken yet fails with the rest, whatever it was: memory may be short.
      taking_.erase(taking_.begin(), collective ? next : std::next(next));
      if (request) {
        group_.recorder->finish(record, false, Clock::now());
        misfit_ = work;
      }
      throw;
    }
  }
  taking_.clear();
}

bool Operations::advance() {
  bool moved = !queue_.empty() && advance_collective();
  if (!p2p_.is_idle()) {
    const std::size_t before = p2p_.pending();
    moved |= p2p_.advance();
    taken_.fetch_sub(static_cast<int>(before - p2p_.pending()));
  }
  return moved;
}

bool Operations::advance_collective() {
  Collective& running = *queue_.front();
  if (!front_started_) {
    front_started_ = true;
    running.work().mark_running();
    // One that follows another begins when that one ends.
    group_.recorder->start(running.record(), std::max(running.work().submitted(), last_end_));
    running.start();
  }
  bool moved = running.advance();
  const bool is_owed = !running.is_done();
  if (is_owed && !(running.is_done_here() && owed_.has_room())) {
    if (!moved) moved = owed_.receive();  // what it waits for may follow
    moved |= send_ahead();
    return moved;
  }
  if (is_owed) {
    running.append_owed(owed_);
    owed_.added();
  }
  ahead_ = nullptr;
  running.end();
  const std::unique_ptr<Collective> finished = std::move(queue_.front());
  queue_.pop_front();
  front_started_ = false;
  taken_.fetch_sub(1);
  last_end_ = Clock::now();
  group_.recorder->finish(finished->record(), true, last_end_);
  finished->work().complete(last_end_);
  return true;
}

// What a far peer needs of those that wait for their turn, see Collective::send_ahead.
bool Operations::send_ahead() {
  constexpr std::size_t most_ahead = 32;
  ahead_ = nullptr;
  if (!group_.is_far || !may_send_ahead_ || queue_.size() < 2) return false;
  bool moved = false;
  touched_.clear();
  if (!queue_.front()->has_sent_all() || !queue_.front()->append_touched(touched_)) return false;
  const std::size_t last = std::min(queue_.size() - 1, most_ahead);
  for (std::size_t i = 0; i < last && queue_[i]->has_sent_all(); ++i) {
    Collective& next = *queue_[i + 1];
    const std::size_t before = touched_.size();
    if (!next.append_touched(touched_) || touched_.overlaps_from(before)) break;
    ahead_ = &next;
    try {
      moved |= next.send_ahead();
    } catch (const StreamClosed&) {  // what has its turn may still have all that it needs
      may_send_ahead_ = false;
      break;
    }
  }
  return moved;
}

void Operations::send_kept() {
  if (!group_.keeps_any) return;
  bool keeps_any = false;
  for (const auto& channel : group_.channels) {
    if (!channel || !channel->keeps_any()) continue;
    channel->send_kept();
    keeps_any |= channel->keeps_any();
  }
  group_.keeps_any = keeps_any;
  group_.keeps_payload &= keeps_any;
}

bool Operations::settle() {
  is_settling_ = true;
  send_kept();
  return owed_.receive();
}

std::size_t Operations::awaited_recv_bytes(int peer) const {
  const bool is_owed = group_.owed[static_cast<std::size_t>(peer)] != 0;
  if (queue_.empty()) return is_settling_ && is_owed ? 1 : 0;
  const std::size_t bytes = queue_.front()->awaited_recv_bytes(peer);
  return bytes > 0 && is_owed ? 1 : bytes;
}

std::size_t Operations::awaited_send_bytes(int peer) const {
  if (group_.keeps_any && group_.channels[static_cast<std::size_t>(peer)]->keeps_any()) return 1;
  if (queue_.empty()) return 0;
  const std::size_t bytes = queue_.front()->awaited_send_bytes(peer);
  return bytes == 0 && ahead_ && may_send_ahead_ ? ahead_->awaited_send_bytes(peer) : bytes;
}

bool Operations::runs_with(int peer) const {
  return front_started_ && !queue_.empty() && queue_.front()->involves(peer);
}

std::optional<Clock::time_point> Operations::next_deadline() const {
  std::optional<Clock::time_point> next = p2p_.next_deadline();
  for (const auto& collective : queue_)
    if (!next || collective->deadline() < *next) next = collective->deadline();
  return next;
}

bool Operations::is_late(Clock::time_point now) const {
  return std::ranges::any_of(queue_, [&](const auto& collective) { return collective->deadline() <= now; });
}

std::string Operations::describe_running() const {
  return queue_.empty() ? "point-to-point operations of communicator '" + group_.name + "'"
                        : queue_.front()->describe();
}

DriverState Operations::state(const std::vector<char>& lost) const {
  DriverState state;
  state.taken = Clock::now();
  const auto room = [&] { return state.pending.size() < max_pending; };
  for (const auto& collective : queue_) {
    ++state.pending_count;
    if (!room()) continue;
    const bool is_running = front_started_ && collective == queue_.front();
    const Work& work = collective->work();
    state.pending.push_back({collective->record(), collective->recorded_call(), is_running, work.is_awaited(),
                             work.submitted(), collective->progress()});
  }
  state.pending_count += p2p_.append_pending(state.pending);
  for (int peer = 0; peer < group_.size; ++peer) {
    state.messages.push_back(p2p_.messages(peer));
    state.messages.back().is_lost = lost[static_cast<std::size_t>(peer)] != 0;
  }
  const auto append = [&](const Submission& submission) {
    const auto* collective = std::get_if<std::unique_ptr<Collective>>(&submission);
    const auto* request = std::get_if<P2pEngine::Request>(&submission);
    if (request && request->tag == internal_tag) return;
    ++state.pending_count;
    if (!room()) return;
    const Work& work = collective ? (*collective)->work() : *request->work;
    state.pending.push_back({collective ? (*collective)->record() : request->record,
                             collective ? (*collective)->recorded_call() : request->recorded_call(),
                             false,
                             work.is_awaited(),
                             work.submitted(),
                             {}});
  };
  std::ranges::for_each(taking_, append);
  std::lock_guard lock(mutex_);
  // Submitted, but the driver is too busy to look at it.
  std::ranges::for_each(new_, append);
  return state;
}

void Operations::fail_watches(std::optional<int> peer, const std::exception_ptr& error) {
  const auto watches = p2p_.take_watches(peer);
  taken_.fetch_sub(static_cast<int>(watches.size()));
  for (const auto& watch : watches) watch.work->fail(error, Clock::now());
}

void Operations::close() {
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  has_new_.store(false, std::memory_order_release);
}

void Operations::fail_all(const std::exception_ptr& error) {
  const auto now = Clock::now();
  const std::vector<std::shared_ptr<Work>> works = p2p_.take_pending();
  std::vector<Submission> never_taken[2];
  never_taken[0].swap(taking_);
  {
    std::lock_guard lock(mutex_);
    never_taken[1].swap(new_);
  }
  taken_.store(0);
  if (const auto work = std::move(misfit_)) work->fail(error);
  const auto fail_one = [&](std::uint64_t record, Work& work) {
    group_.recorder->finish(record, false, now);
    work.fail(error, now);
  };
  ahead_ = nullptr;
  owed_.clear();
  while (!queue_.empty()) {
    const std::unique_ptr<Collective> collective = std::move(queue_.front());
    queue_.pop_front();
    fail_one(collective->record(), collective->work());
  }
  for (const auto& submissions : never_taken) {
    for (const Submission& submission : submissions) {
      if (const auto* collective = std::get_if<std::unique_ptr<Collective>>(&submission)) {
        fail_one((*collective)->record(), (*collective)->work());
      } else {
        const auto& request = std::get<P2pEngine::Request>(submission);
        fail_one(request.record, *request.work);
      }
    }
  }
  for (const auto& work : works) work->fail(error, now);
}

}  // namespace holmes
