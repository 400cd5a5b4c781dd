// The error tree, and Failure, an error as a value. Subclasses say what the caller should do; every error carries who,
// where and why.
#pragma once

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "holmes/core/text.hpp"

namespace holmes {

// What an error knows about its place. Absent means "does not apply", never a sentinel.
struct ErrorContext {
  std::optional<int> rank{};          // rank that reports the error, in the communicator it happened on
  std::optional<int> peer{};          // rank the error is about
  std::string host{};                 // host of `peer` (of `rank` where there is no peer)
  std::string nic{};                  // NIC (interface name) the connection uses
  std::optional<int> system_errno{};  // errno of the failed system call
};

// The kinds an abort frame carries over the wire; values are part of the protocol.
enum class ErrorKind : int {
  usage = 1,
  nic = 2,
  mismatch = 3,
  communicator = 10,
  peer_lost = 11,
  timeout = 12,
  aborted = 13,
  unreachable = 14,
  integrity = 15,
  job = 20,
  protocol = 21,
  system = 22,
};

// Root of every error this library throws.
class HolmesError : public std::runtime_error {
public:
  HolmesError(ErrorKind kind, const std::string& message, ErrorContext context = {})
      : std::runtime_error(readable(message)), kind_(kind), context_(std::move(context)) {}
  ErrorKind kind() const noexcept { return kind_; }
  const ErrorContext& context() const noexcept { return context_; }

private:
  ErrorKind kind_;
  ErrorContext context_;
};

// One constructor for every subclass: its kind is fixed, its parent is named.
#define HOLMES_DEFINE_ERROR(Name, Parent, kind_value)                      \
  class Name : public Parent {                                             \
  public:                                                                  \
    explicit Name(const std::string& message, ErrorContext context = {})   \
        : Parent(ErrorKind::kind_value, message, std::move(context)) {}    \
                                                                           \
  protected:                                                               \
    Name(ErrorKind kind, const std::string& message, ErrorContext context) \
        : Parent(kind, message, std::move(context)) {}                     \
  }

// Fix the call: an argument, a NIC selection or the order of calls is wrong.
HOLMES_DEFINE_ERROR(UsageError, HolmesError, usage);
HOLMES_DEFINE_ERROR(NicError, UsageError, nic);            // a NIC does not exist, is down or has no address
HOLMES_DEFINE_ERROR(MismatchError, UsageError, mismatch);  // ranks disagree on operation, dtype, count, root or order

// Rebuild the communicator: the group is broken, the process is fine.
HOLMES_DEFINE_ERROR(CommunicatorError, HolmesError, communicator);
HOLMES_DEFINE_ERROR(PeerLostError, CommunicatorError, peer_lost);
HOLMES_DEFINE_ERROR(TimeoutError, CommunicatorError, timeout);
HOLMES_DEFINE_ERROR(AbortedError, CommunicatorError, aborted);
HOLMES_DEFINE_ERROR(UnreachableError, CommunicatorError, unreachable);
HOLMES_DEFINE_ERROR(IntegrityError, CommunicatorError, integrity);  // bytes have changed on their way

// Restart the job: the process or the peer's library cannot go on.
HOLMES_DEFINE_ERROR(JobError, HolmesError, job);
HOLMES_DEFINE_ERROR(ProtocolError, JobError, protocol);  // a peer speaks another protocol or failed authentication
HOLMES_DEFINE_ERROR(SystemError, JobError, system);      // the operating system refused memory, descriptors, ...

#undef HOLMES_DEFINE_ERROR

// The subclass's name: "TimeoutError".
const char* name(ErrorKind kind);

// Throws the subclass that `kind` names: how an error that arrived in an abort frame, or that a stored
// failure holds, is raised again with its own type.
[[noreturn]] void throw_error(ErrorKind kind, const std::string& message, const ErrorContext& context = {});

// "Connection refused (errno 111)".
std::string errno_text(int system_errno);

// What to do where a limit of the system was hit: "; this process may open 1024 files (ulimit -n), raise that". Empty
// where `system_errno` says nothing about one.
std::string limit_text(int system_errno);

// The standard ending of a sentence about a peer: "rank 3 (host b1) on NIC roce0".
std::string describe_peer(int peer, const std::string& host, const std::string& nic);

// {0, 1, 2, 5} as "ranks 0-2, 5".
std::string ranks_text(const std::vector<int>& ranks);

// An error as a value that is kept, sent to the peers and raised.
struct Failure {
  ErrorKind kind = ErrorKind::communicator;
  std::string message;
  ErrorContext context{};

  [[noreturn]] void raise() const { throw_error(kind, message, context); }
};

// What a peer did that left in order, as errors say it.
inline constexpr const char* farewell = "destroyed its communicator";
bool is_farewell(const Failure& failure);

Failure failure_of(const HolmesError& error);
// What a failed Work raises.
std::exception_ptr error_of(const Failure& failure);
// What every later call on communicator `name` raises.
[[noreturn]] void throw_dead(const std::string& name, const Failure& failure);

}  // namespace holmes
