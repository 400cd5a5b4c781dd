// DebugSocket: the UNIX socket over which a process gives its flight record to its own user.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "holmes/core/fork.hpp"
#include "holmes/core/unique_fd.hpp"

namespace holmes {

// One thread.
class DebugSocket {
public:
  // Listens in `folder`, which is made where missing and must be this user's alone. Removes what ended processes left
  // there. Throws SystemError.
  explicit DebugSocket(const std::string& folder);

  int fd() const { return listener_.get(); }
  const std::string& path() const { return path_; }
  // Takes one connection and gives it `text`, for two seconds at most; other users' are refused.
  void serve(std::string (*text)()) const;

private:
  std::string path_;
  UniqueFd listener_;
  std::unique_ptr<UninheritedSockets> uninherited_;
};

}  // namespace holmes
