// ShortTree: a short broadcast along a binomial tree, as TreeBroadcast.
#pragma once

#include "holmes/collectives/short_call.hpp"
#include "holmes/collectives/tree_broadcast.hpp"

namespace holmes {

class ShortTree final : public ShortCall {
public:
  ShortTree(Group& group, const Signature& signature)
      : ShortCall(group, signature), place_(place_in(group, *signature.root)) {}

  bool has_room() const override;
  bool send() override;
  ShortState take() override;
  bool append_owed(OwedHeaders& owed, Clock::time_point deadline) const override;

private:
  static TreePlace place_in(const Group& group, int root);
  std::size_t data_bytes() const;
  bool send_to_children(const void* data);
  void finish();

  const TreePlace place_;
  bool is_sent_ = false;  // to the children
};

}  // namespace holmes
