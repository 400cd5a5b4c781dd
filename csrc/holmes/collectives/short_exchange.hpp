// ShortExchange: a short call in which each pair of ranks exchanges what the two want of each other.
#pragma once

#include "holmes/collectives/short_call.hpp"

namespace holmes {

// As Exchange, OneStepAllReduce and ReduceScatter. Where the group's operations end locally, so does this.
class ShortExchange final : public ShortCall {
public:
  ShortExchange(Group& group, const Signature& signature)
      : ShortCall(group, signature), ends_early_(ends_locally(group, signature)) {}

  bool has_room() const override;
  bool send() override;
  ShortState take() override;
  bool append_owed(OwedHeaders& owed, Clock::time_point deadline) const override;

private:
  bool talks_to(int peer) const { return !ends_early_ || signature_.root == group_.rank || signature_.root == peer; }
  void finish();

  bool ends_early_;
};

}  // namespace holmes
