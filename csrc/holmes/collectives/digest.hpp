// ResultDigest: whether the result of an operation is the same on all ranks.
#pragma once

#include "holmes/collectives/exchange.hpp"

namespace holmes {

// Comes right behind the operation whose result `result` is, and has its signature: by then that has ended here, and
// the caller, who waits for this one, has not touched it. Every rank tells all others the CRC32C of its result. Where
// one differs, throws IntegrityError on all of them: it names the ranks that are not of the majority, or all where
// there is none, with host and NIC. `own_place`: "rank 0 (host a) on NIC eth0".
class ResultDigest final : public Exchange {
public:
  ResultDigest(Group& group, const Signature& signature, std::shared_ptr<Work> work, Clock::time_point deadline,
               std::vector<Buffer> result, std::string own_place);

protected:
  bool may_send(int /*peer*/) const override { return is_read_; }
  bool may_end_early() const override { return false; }  // also where the operation has a root, every rank is heard
  std::size_t agreed_bytes() const override { return 0; }
  bool compute() override;
  bool is_computed() const override { return is_compared_; }

private:
  bool read_some();
  void compare() const;
  std::string place(int rank) const;

  std::vector<Buffer> result_;
  std::string own_place_;
  std::vector<std::uint64_t> crcs_;  // by rank
  std::size_t piece_ = 0;            // of the result: where reading it goes on
  std::size_t offset_ = 0;
  bool is_read_ = false;
  bool is_compared_ = false;
};

}  // namespace holmes
