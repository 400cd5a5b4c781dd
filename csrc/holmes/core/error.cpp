#include "holmes/core/error.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace holmes {

void throw_error(ErrorKind kind, const std::string& message, const ErrorContext& context) {
  switch (kind) {
    case ErrorKind::usage:
      throw UsageError(message, context);
    case ErrorKind::nic:
      throw NicError(message, context);
    case ErrorKind::mismatch:
      throw MismatchError(message, context);
    case ErrorKind::communicator:
      throw CommunicatorError(message, context);
    case ErrorKind::peer_lost:
      throw PeerLostError(message, context);
    case ErrorKind::timeout:
      throw TimeoutError(message, context);
    case ErrorKind::aborted:
      throw AbortedError(message, context);
    case ErrorKind::unreachable:
      throw UnreachableError(message, context);
    case ErrorKind::integrity:
      throw IntegrityError(message, context);
    case ErrorKind::job:
      throw JobError(message, context);
    case ErrorKind::protocol:
      throw ProtocolError(message, context);
    case ErrorKind::system:
      throw SystemError(message, context);
  }
  throw ProtocolError("unknown error kind " + std::to_string(static_cast<int>(kind)) + ": " + message, context);
}

const char* name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::usage:
      return "UsageError";
    case ErrorKind::nic:
      return "NicError";
    case ErrorKind::mismatch:
      return "MismatchError";
    case ErrorKind::communicator:
      return "CommunicatorError";
    case ErrorKind::peer_lost:
      return "PeerLostError";
    case ErrorKind::timeout:
      return "TimeoutError";
    case ErrorKind::aborted:
      return "AbortedError";
    case ErrorKind::unreachable:
      return "UnreachableError";
    case ErrorKind::integrity:
      return "IntegrityError";
    case ErrorKind::job:
      return "JobError";
    case ErrorKind::protocol:
      return "ProtocolError";
    case ErrorKind::system:
      return "SystemError";
  }
  return "HolmesError";
}

std::string errno_text(int system_errno) {
  return std::string(std::strerror(system_errno)) + " (errno " + std::to_string(system_errno) + ")";
}

std::string limit_text(int system_errno) {
  if (system_errno == EMFILE) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return "; this process may open " + std::to_string(limit.rlim_cur) + " files (ulimit -n), raise that";
  }
  if (system_errno == EFBIG) {
    rlimit limit{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    return "; this process may make files of " + std::to_string(limit.rlim_cur) +
           " bytes, those in memory too (ulimit -f), raise that";
  }
  if (system_errno == ENFILE) return "; all processes together may open no more files (sysctl fs.file-max), raise that";
  return "";
}

std::string describe_peer(int peer, const std::string& host, const std::string& nic) {
  return "rank " + std::to_string(peer) + " (host " + (host.empty() ? "unknown" : host) + ") on NIC " +
         (nic.empty() ? "unknown" : nic);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < ranks.size(); begin = end) {
    for (end = begin + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) ++end;
    text += (begin == 0 ? "" : ", ") + std::to_string(ranks[begin]);
    if (end > begin + 1) text += "-" + std::to_string(ranks[end - 1]);
  }
  return (ranks.size() > 1 ? "ranks " : "rank ") + text;
}

bool is_farewell(const Failure& failure) {
  return failure.kind == ErrorKind::aborted && failure.message.find(farewell) != std::string::npos;
}

Failure failure_of(const HolmesError& error) { return {error.kind(), error.what(), error.context()}; }

std::exception_ptr error_of(const Failure& failure) {
  try {
    throw_error(failure.kind, failure.message, failure.context);
  } catch (...) {
    return std::current_exception();
  }
}

void throw_dead(const std::string& name, const Failure& failure) {
  throw_error(failure.kind, "communicator '" + name + "' is dead, make a new one. It failed with: " + failure.message,
              failure.context);
}

}  // namespace holmes
