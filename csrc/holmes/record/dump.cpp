#include "holmes/record/dump.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/record/communicator_record.hpp"
#include "holmes/record/link_use.hpp"
#include "holmes/record/registry.hpp"

namespace holmes {
namespace {

constexpr auto failure_patience = std::chrono::milliseconds(100);
constexpr auto folder_patience = std::chrono::milliseconds(500);  // a dead network file system never answers

std::atomic<StackSource> stack_source{nullptr};

// Never destroyed, and a forked child gets its own: its parent's mutexes may be locked for ever.
struct Dumps {
  std::uint64_t epoch = fork_epoch();
  std::mutex mutex;  // protects the next two
  std::optional<std::string> folder;
  std::optional<std::string> failure;  // the last one of this process
  std::mutex writing;
  std::atomic<std::uint64_t> asked{0};
  std::uint64_t done = 0;  // under `writing`: requests up to this one are answered by what was written
};

Dumps& dumps() { return own_of_process<Dumps>(); }

std::optional<int> job_rank_of(const std::vector<CommunicatorRecord>& records) {
  for (const CommunicatorRecord& record : records)
    if (static_cast<std::size_t>(record.rank) < record.ranks.size())
      if (const auto rank = record.ranks[static_cast<std::size_t>(record.rank)].job_rank) return rank;
  return std::nullopt;
}

double seconds_of(std::chrono::system_clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

// Samples as rows, of which there may be hundreds.
void append_json(JsonWriter& json, const LinkRecord& link) {
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  json.begin_object().field("nic", link.interface).field("from", link.from).field("to", link.to);
  json.key("columns").raw(R"(["at_s", "sent_bytes", "round_trip_s", "stalled"])").key("samples").begin_array();
  for (const LinkSample& sample : link.samples)
    json.begin_array()
        .value(seconds(sample.at.time_since_epoch()))
        .value(sample.sent_bytes)
        .value(seconds(sample.round_trip))
        .value(sample.stalled)
        .end_array();
  json.end_array().end_object();
}

// Whole or not at all: a reader sees the old file or the new one.
void write_file(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  const auto check = [&](bool ok, const char* what) {
    if (!ok)
      throw SystemError(std::string("cannot ") + what + " " + part + ": " + errno_text(errno), {.system_errno = errno});
  };
  UniqueFd file(::open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  check(static_cast<bool>(file), "open");
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t bytes = ::write(file.get(), text.data() + done, text.size() - done);
    if (bytes < 0 && errno == EINTR) continue;
    check(bytes >= 0, "write");
    done += static_cast<std::size_t>(bytes);
  }
  check(::rename(part.c_str(), path.c_str()) == 0, "rename");
}

// Changes the file that all processes of the folder watch.
void request_dumps(const std::string& folder) {
  UniqueFd file(::open(request_file(folder).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (file) ::futimens(file.get(), nullptr);
}

// Everything that touches the folder.
void write_record(const std::string& folder, const std::string& record, bool asks_others) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    throw SystemError("cannot make the folder " + folder + ": " + errno_text(errno), {.system_errno = errno});
  std::string host = host_name();
  for (char& character : host)
    if (character == '/') character = '_';
  write_file(folder + "/" + host + "-" + std::to_string(::getpid()) + ".json", record);
  if (asks_others) request_dumps(folder);  // they may be in no operation and know nothing yet
}

// What a thread that writes tells the one that waits for it.
struct Writing {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::string problem;
};

// Throws where the folder refuses, or does not answer in time: the thread that asks it then stays behind.
void write_in_time(const std::string& folder, std::string record, bool asks_others) {
  static std::atomic<Writing*> hung{nullptr};
  const auto answered = [](Writing& writing) {
    const std::lock_guard lock(writing.mutex);
    return writing.is_done;
  };
  const SystemError no_answer("the folder " + folder + " did not answer within " +
                                  std::to_string(folder_patience.count()) + " ms; choose one on a disk of this host",
                              {.system_errno = ETIMEDOUT});
  if (Writing* const earlier = hung.load(); earlier != nullptr && !answered(*earlier)) throw no_answer;
  auto made = std::make_unique<Writing>();
  Writing* const writing = made.get();
  std::thread([=, record = std::move(record)] {
    std::string problem;
    try {
      write_record(folder, record, asks_others);
    } catch (const std::exception& error) {
      problem = made_or([&] { return std::string(error.what()); }, [] { return std::string("out of memory"); });
    }
    const std::lock_guard lock(writing->mutex);
    writing->problem = std::move(problem);
    writing->is_done = true;
    writing->changed.notify_all();
  }).detach();
  made.release();  // stays where the thread does
  std::unique_lock lock(writing->mutex);
  if (!writing->changed.wait_for(lock, folder_patience, [&] { return writing->is_done; })) {
    hung.store(writing);
    throw no_answer;
  }
  const std::string problem = writing->problem;
  lock.unlock();
  delete writing;
  if (!problem.empty()) throw SystemError(problem);
}

}  // namespace

std::string process_record_json(const std::string& reason, Duration patience, Duration settle) {
  const auto records = collect_records(patience, settle);
  look_at_links();
  const auto links = link_records();
  const auto now = Clock::now();
  const auto wall = std::chrono::system_clock::now();
  JsonWriter json;
  json.begin_object().field("kind", "holmes-flight-record").field("version", 1);
  json.field("host", host_name()).field("pid", ::getpid()).field("job_rank", job_rank_of(records));
  json.field("testbed", ::getenv("HOLMES_TESTBED") != nullptr).field("reason", reason);
  json.field("monotonic_s", std::chrono::duration<double>(now.time_since_epoch()).count());
  json.field("wall_s", seconds_of(wall));
  json.key("communicators").begin_array();
  for (const CommunicatorRecord& record : records) append_json(json, record);
  json.end_array().key("metrics");
  append_json(json, collect_metrics());
  json.key("links").begin_array();
  for (const LinkRecord& link : links) append_json(json, link);
  json.end_array().key("stacks");
  const StackSource source = stack_source.load();
  json.raw(source ? source(patience) : "[]");
  json.end_object();
  return json.text() + "\n";
}

void set_dump_folder(const std::optional<std::string>& folder) {
  Dumps& own = dumps();
  std::lock_guard lock(own.mutex);
  own.folder = folder;
}

std::optional<std::string> dump_folder() {
  Dumps& own = dumps();
  std::lock_guard lock(own.mutex);
  return own.folder;
}

bool has_dump_folder() {
  Dumps& own = dumps();
  std::lock_guard lock(own.mutex);
  return own.folder.has_value();
}

std::string request_file(const std::string& folder) { return folder + "/request"; }

namespace {

// What the record is about: a failure stays it, though the others that fail ask for the record again.
std::string reason_or_failure(const std::string& reason) {
  Dumps& own = dumps();
  std::lock_guard lock(own.mutex);
  return own.failure.value_or(reason);
}

void write_once(const std::string& asked_by, Duration patience, Duration settle, bool asks_others) noexcept {
  try {
    const auto folder = dump_folder();
    if (!folder) return;
    Dumps& own = dumps();
    const std::uint64_t ticket = ++own.asked;
    std::lock_guard lock(own.writing);
    // Many communicators may fail at once: what is written after the last of them holds all of them.
    if (own.done >= ticket) return;
    const std::uint64_t answered = own.asked;
    const std::string reason = reason_or_failure(asked_by);
    write_in_time(*folder, process_record_json(reason, patience, settle), asks_others);
    own.done = answered;
    log(LogLevel::info, std::nullopt, "flight record written to " + *folder + " (" + reason + ")");
  } catch (const std::exception& error) {
    where_memory_allows([&] { log(LogLevel::warn, std::nullopt, std::string("no flight record: ") + error.what()); });
  }
}

}  // namespace

void dump(const std::string& reason) noexcept { write_once(reason, record_patience, record_settle, false); }

void dump_on_failure(const std::string& message) noexcept {
  where_memory_allows([&] {
    const auto folder = dump_folder();
    if (!folder) return;
    const std::string failure = "failure: " + message;
    {
      Dumps& own = dumps();
      std::lock_guard lock(own.mutex);
      own.failure = failure;
    }
    write_once(failure, failure_patience, Duration::zero(), true);
  });
}

void set_stack_source(StackSource source) { stack_source.store(source); }

}  // namespace holmes
