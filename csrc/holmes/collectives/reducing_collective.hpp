// ReducingCollective: a collective in which ranks reduce a block each, slice by slice.
#pragma once

#include "holmes/collectives/slice_reducer.hpp"

namespace holmes {

class ReducingCollective : public Collective {
protected:
  ReducingCollective(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                     SliceReducer reducer);

  // How much of `peer`'s contribution to the own block has come. Absent: none may be taken now.
  virtual std::optional<std::size_t> contributed_bytes(int peer) const { return received_bytes(peer); }
  // Whether the next result has a place.
  virtual bool has_room() const { return true; }
  bool awaits_peek(int peer) const override;

  bool compute() final;
  bool is_computed() const final { return reducer_.is_done(); }

  SliceReducer reducer_;  // of this rank's block

private:
  std::vector<std::size_t> contributed_bytes_;  // by rank
};

}  // namespace holmes
