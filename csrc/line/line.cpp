// holmes-line: the links of a testbed that delay, lose and reorder packets, for kernels without netem. One process for
// a testbed, a thread for each direction of a link; it belongs to the testbed's first process and ends with it.
//
//   holmes-line FILE     a line of FILE for each lane: NAME IN OUT SEED key=value ...  (see read_settings)
//
// SIGHUP: reads FILE again, for new values of the lanes that there are. SIGUSR1: prints what became of the packets.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "line/lane.hpp"
#include "line/packet_socket.hpp"

namespace holmes::line {

namespace {

struct Settings {
  std::string name, in, out;
  std::uint64_t seed = 0;
  Impairment impairment;
};

double read_number(const std::string& word, std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || !(number >= 0)) {
    throw std::runtime_error("'" + word + "': its value must be a number of 0 or more");
  }
  return number;
}

Duration milliseconds(double number) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double, std::milli>(number));
}

void read_value(Impairment& impairment, const std::string& word) {
  const std::size_t equals = word.find('=');
  const std::string key = word.substr(0, equals);
  const double value = equals == std::string::npos ? -1 : read_number(word, std::string_view(word).substr(equals + 1));
  if (key == "delay_ms") {
    impairment.delay = milliseconds(value);
  } else if (key == "jitter_ms") {
    impairment.jitter = milliseconds(value);
  } else if (key == "loss_percent") {
    impairment.loss = value / 100;
  } else if (key == "reorder_percent") {
    impairment.reorder = value / 100;
  } else if (key == "most_bytes") {
    impairment.most_bytes = static_cast<std::size_t>(value);
  } else if (key == "most_wait_ms") {
    impairment.most_wait = milliseconds(value);
  } else {
    throw std::runtime_error(
        "'" + word + "': keys are delay_ms, jitter_ms, loss_percent, reorder_percent, most_bytes, most_wait_ms");
  }
}

std::vector<Settings> read_settings(const char* path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(std::string(path) + " cannot be read");
  std::vector<Settings> lanes;
  for (std::string text; std::getline(file, text);) {
    std::istringstream words(text);
    Settings lane;
    if (!(words >> lane.name >> lane.in >> lane.out >> lane.seed)) {
      throw std::runtime_error(std::string(path) + ": a line is NAME IN OUT SEED key=value ..., not '" + text + "'");
    }
    for (std::string word; words >> word;) read_value(lane.impairment, word);
    lanes.push_back(std::move(lane));
  }
  return lanes;
}

// A lane between two devices, on a thread of its own.
class Runner {
public:
  explicit Runner(const Settings& settings)
      : name_(settings.name),
        receiver_(settings.in),
        sender_(settings.out),
        lane_(settings.seed),
        impairment_(settings.impairment) {
    thread_ = std::thread([this] { run(); });
  }
  ~Runner() {
    must_end_ = true;
    thread_.join();
  }

  const std::string& name() const { return name_; }

  void set(const Impairment& impairment) {
    const std::lock_guard lock(mutex_);
    impairment_ = impairment;
  }

  // What became of the packets; frames, of which each may be many packets, are those that were sent on.
  void print() {
    const std::lock_guard lock(mutex_);
    overflowed_ += receiver_.take_overflowed();
    const Counters& counters = lane_.counters();
    std::printf(
        "{\"lane\": \"%s\", \"packets\": %llu, \"lost\": %llu, \"reordered\": %llu, \"dropped\": %llu, "
        "\"overflowed\": %llu, \"refused\": %llu, \"frames\": %llu, \"late_frames\": %llu}\n",
        name_.c_str(), number(counters.packets), number(counters.lost), number(counters.reordered),
        number(counters.dropped), number(counters.overflowed + overflowed_ + receiver_.too_large()), number(refused_),
        number(frames_), number(late_frames_));
  }

private:
  static constexpr int at_a_time = 64;
  static constexpr Duration most_sleep = std::chrono::milliseconds(100);  // until it notices that it must end
  static constexpr Duration busy_sleep = std::chrono::microseconds(200);
  static constexpr Duration late = std::chrono::milliseconds(1);

  static unsigned long long number(std::uint64_t value) { return value; }

  void run() {
    ::prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; the usual 50 us would be added to every delay
    while (!must_end_) {
      Duration sleep{0};
      {
        const std::lock_guard lock(mutex_);
        lane_.set(impairment_);
        if (!take_frames())
          sleep = send_due_frames();
        else
          send_due_frames();
      }
      if (sleep > Duration{0}) wait(std::min(sleep, most_sleep));
    }
  }

  // Whether there may be more.
  bool take_frames() {
    for (int i = 0; i < at_a_time; ++i) {
      const Bytes frame = receiver_.front();
      if (frame.empty()) return false;
      lane_.take(frame, Clock::now() - receiver_.age());
      receiver_.release();
    }
    return true;
  }

  // How long nothing more is to be sent.
  Duration send_due_frames() {
    while (const auto due = lane_.next_due()) {
      const Time now = Clock::now();
      if (*due > now) {
        was_busy_ = false;
        return *due - now;
      }
      const Sender::Result result = sender_.send(lane_.front());
      if (result == Sender::Result::busy) {
        was_busy_ = true;
        lane_.drop_overdue(now);
        return busy_sleep;
      }
      ++frames_;
      if (result == Sender::Result::refused) ++refused_;
      // Behind a device that takes no more they wait as in its queue.
      if (!was_busy_ && now - *due > late) ++late_frames_;
      lane_.pop();
    }
    was_busy_ = false;
    return most_sleep;
  }

  void wait(Duration duration) const {
    pollfd event{receiver_.fd(), POLLIN, 0};
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
    const timespec timeout{ns / 1'000'000'000, ns % 1'000'000'000};
    ::ppoll(&event, 1, &timeout, nullptr);
  }

  const std::string name_;
  std::mutex mutex_;  // of what follows; held while frames are moved, not while the thread sleeps
  Receiver receiver_;
  Sender sender_;
  Lane lane_;
  Impairment impairment_;
  std::uint64_t frames_ = 0, late_frames_ = 0, refused_ = 0, overflowed_ = 0;
  bool was_busy_ = false;
  std::atomic<bool> must_end_{false};
  std::thread thread_;
};

void set_again(std::vector<std::unique_ptr<Runner>>& runners, const char* path) {
  for (const Settings& settings : read_settings(path)) {
    for (const auto& runner : runners) {
      if (runner->name() == settings.name) runner->set(settings.impairment);
    }
  }
}

int run(const char* path) {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int each : {SIGHUP, SIGUSR1, SIGTERM, SIGINT}) ::sigaddset(&signals, each);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::vector<std::unique_ptr<Runner>> runners;
  for (const Settings& settings : read_settings(path)) runners.push_back(std::make_unique<Runner>(settings));
  std::puts("ready");
  std::fflush(stdout);
  while (true) {
    int signal = 0;
    ::sigwait(&signals, &signal);
    if (signal == SIGHUP) {
      set_again(runners, path);
      std::puts("set");
    } else if (signal == SIGUSR1) {
      for (const auto& runner : runners) runner->print();
      std::puts("printed");
    } else {
      return 0;
    }
    std::fflush(stdout);
  }
}

}  // namespace

}  // namespace holmes::line

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: holmes-line FILE\n", stderr);
    return 2;
  }
  try {
    return holmes::line::run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "holmes-line: %s\n", error.what());
    return 1;
  }
}
