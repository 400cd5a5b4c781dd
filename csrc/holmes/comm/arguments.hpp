// What every communicator for host memory asks of the arguments of its operations. All throw UsageError.
#pragma once

#include <string>
#include <vector>

#include "holmes/core/options.hpp"
#include "holmes/core/types.hpp"

namespace holmes {

class Arguments {
public:
  explicit Arguments(const CommunicatorOptions& options) : options_(options) {}

  // `what` names the argument: "broadcast: root".
  void check_rank(const char* what, int value) const;
  // Of a send or receive: a rank, and another one than this.
  void check_peer(bool is_send, int peer) const;
  void check_one_per_rank(const char* what, const std::vector<Buffer>& buffers, DType dtype) const;
  static void check_equal_count(const char* operation, const Buffer& output, const Buffer& input);
  // Only groups that span clusters compress.
  void check_not_compressed(const CallOptions& call) const;

private:
  const CommunicatorOptions& options_;
};

}  // namespace holmes
