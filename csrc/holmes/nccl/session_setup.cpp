// How a Session gets its ncclComm_t.
#include <cstddef>
#include <thread>

#include "holmes/nccl/session.hpp"

namespace holmes::nccl {
namespace {

constexpr auto poll_pause = std::chrono::microseconds(20);  // between two questions whether a call is done
constexpr int shrink_default = 0, shrink_abort = 1;         // NCCL_SHRINK_DEFAULT, NCCL_SHRINK_ABORT

}  // namespace

Result Session::wait_while_in_progress(const char* what, Result result, Clock::time_point deadline) {
  while (result == in_progress) {
    throw_if_dead();
    if (Clock::now() >= deadline)
      fail_and_throw(ErrorKind::timeout, place() + ": " + what + " is not done at its deadline; a peer does not take " +
                                             "part, or cannot be reached over the chosen NICs");
    std::this_thread::sleep_for(poll_pause);
    const Result asked = api_.comm_get_async_error(comm_, &result);
    if (asked != success) return asked;
  }
  return result;
}

Config Session::config() const {
  Config config = make_config(api_.version);
  config.blocking = 0;
  config.net_name = options_.net.c_str();
  // Several communicators of one library on one device run in the order of the calls (2.31 and later; before, images
  // are told so by their environment).
  if (config.size > offsetof(Config, launch_order_implicit)) config.launch_order_implicit = 1;
  return config;
}

void Session::connect(const UniqueId& id, Clock::time_point deadline) {
  Config settings = config();
  const cuda::CurrentDevice current(device_);
  Result result;
  {
    std::unique_lock issue(device_.issue, std::defer_lock);
    if (!issue.try_lock_until(deadline))
      fail_and_throw(ErrorKind::timeout, place() + ": another communicator keeps the device; set-up not begun");
    Comm comm = nullptr;
    result = api_.comm_init_rank_config(&comm, options_.size, id, options_.rank, &settings);
    comm_ = comm;
  }
  // The peers are waited for without the lock: their set-up may need this device's other communicators.
  result = wait_while_in_progress("set-up of NCCL", result, deadline);
  if (result != success)
    fail_and_throw(ErrorKind::communicator, place() + ": NCCL's set-up failed: " + api_.describe(result));
}

std::string Session::connect_shrunk(Session& parent, std::vector<int> excluded, Clock::time_point deadline) {
  Config settings = config();
  const cuda::CurrentDevice current(device_);
  // NCCL may write to it after a deadline of ours: it stays behind then.
  auto* const made = new Comm(nullptr);
  std::unique_lock issue(device_.issue, std::defer_lock);
  if (!issue.try_lock_until(deadline))
    fail_and_throw(ErrorKind::timeout, place() + ": another communicator keeps the device; shrinking not begun");
  const Comm old = parent.comm_;
  if (old == nullptr) {
    delete made;
    return "the communicator to shrink has failed";
  }
  const int flags = parent.has_pending() ? shrink_abort : shrink_default;
  Result result = api_.comm_shrink(old, excluded.data(), static_cast<int>(excluded.size()), made, &settings, flags);
  // Until the new one is there, the old one tells how far it is.
  while (result == in_progress && *made == nullptr) {
    if (Clock::now() >= deadline)
      fail_and_throw(ErrorKind::timeout,
                     place() + ": shrinking is not done at its deadline; a rank that stays does not take part");
    std::this_thread::sleep_for(poll_pause);
    Result state = success;
    const Result asked = api_.comm_get_async_error(old, &state);
    if (asked != success || state != in_progress) result = asked != success ? asked : state;
  }
  comm_ = *made;
  issue.unlock();
  delete made;
  if (result == success && comm_.load() == nullptr) return "NCCL made no communicator";
  if (comm_.load() != nullptr && (result == success || result == in_progress))
    result = wait_while_in_progress("shrinking", in_progress, deadline);
  return result == success ? "" : api_.describe(result);
}

}  // namespace holmes::nccl
