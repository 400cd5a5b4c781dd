// Compression: how the hop between clusters of an operation is compressed, and what that left out of a tensor so far.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "holmes/reduce/codec.hpp"

namespace holmes {

// One object for each tensor where it keeps something of that: with error feedback what the code lost of this rank's
// share, which is added the next time, so that errors do not add up over steps; with differences what the ranks that
// share the hop have of all_gather's result, so that only what has changed since goes over it. Without either one
// object serves all. Thread-safe, but what keeps something only one operation at a time may use.
class Compression {
public:
  struct Settings {
    Codec codec = Codec::bf16;
    bool error_feedback = false;
    bool differences = false;  // of all_gather
  };
  explicit Compression(const Settings& settings) : settings_(settings) {}

  const Settings& settings() const { return settings_; }
  Codec codec() const { return settings_.codec; }
  // Forgets what it keeps; on all ranks alike. Throws UsageError while an operation uses it.
  void reset();

  // --- for the communicator ---
  // What an operation has of it until the last copy goes; also of an empty share, which has no memory.
  struct Kept {
    std::shared_ptr<float> residual;   // of this rank's share; null without error feedback
    std::shared_ptr<float> reference;  // what has arrived; null without differences
    bool is_first = false;             // nothing is in `reference` yet
  };
  // `count`: of the tensor, `share`: of what this rank encodes of it; `reference_count`: 0 where there are no
  // differences of it. `user`: the communicator; one that is another than the last time has another history, so nothing
  // of the reference holds. Throws UsageError where another operation has it, or the tensor's count has changed: on all
  // ranks alike.
  static Kept acquire(const std::shared_ptr<Compression>& compression, std::size_t count, std::size_t share,
                      std::size_t reference_count, const std::shared_ptr<const void>& user);
  // With differences: all that was to be kept in the reference is there.
  void complete_reference();

private:
  void check_free() const;

  const Settings settings_;
  std::mutex mutex_;
  std::vector<float> residual_;
  std::vector<float> reference_;
  std::weak_ptr<const void> user_;
  std::size_t count_ = 0;  // of the tensor; 0: nothing is kept
  bool has_reference_ = false;
  bool in_use_ = false;
};

// What operations that this thread starts are compressed with where their call names nothing and they can be; null:
// nothing. Returns what it was before.
std::shared_ptr<Compression> exchange_thread_compression(std::shared_ptr<Compression> compression);
const std::shared_ptr<Compression>& thread_compression();

// Of a scope.
class ThreadCompression {
public:
  explicit ThreadCompression(std::shared_ptr<Compression> compression)
      : before_(exchange_thread_compression(std::move(compression))) {}
  ThreadCompression(const ThreadCompression&) = delete;
  ThreadCompression& operator=(const ThreadCompression&) = delete;
  ~ThreadCompression() { exchange_thread_compression(std::move(before_)); }

private:
  std::shared_ptr<Compression> before_;
};

}  // namespace holmes
