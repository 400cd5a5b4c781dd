// RoutedExchange: blocks from every rank of a wide group to every other one, in two hops.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "holmes/comm/step_queue.hpp"

namespace holmes {

struct WideParts;

// From a rank to the one of its row that is in the receiver's column, and from there to the receiver. First the sizes
// of all blocks go that way, then the blocks, in pieces of which each rank holds a bounded number of bytes. Its methods
// are called in their order, each when the operations of the one before are final.
class RoutedExchange {
public:
  RoutedExchange(std::shared_ptr<const WideParts> parts, std::vector<Buffer> outputs, std::vector<Buffer> inputs);

  void tell_row(StepList& steps, const CallOptions& call);
  void tell_columns(StepList& steps, const CallOptions& call);
  // In how many pieces the blocks go. Throws MismatchError where a block that comes is not as long as its output.
  std::size_t checked_pieces() const;
  void send_in_row(StepList& steps, std::size_t piece, const CallOptions& call);
  void send_in_columns(StepList& steps, std::size_t piece, const CallOptions& call);
  // What came goes to the outputs.
  void take(std::size_t piece);

private:
  using Words = std::vector<std::uint64_t>;

  std::uint64_t piece_bytes() const;
  // Of a block of so many bytes.
  std::uint64_t bytes_of(std::uint64_t block_bytes, std::size_t piece) const;
  bool is_own_column(int number) const;

  std::shared_ptr<const WideParts> parts_;
  std::vector<Buffer> outputs_;
  std::vector<Buffer> inputs_;
  std::vector<int> passed_on_;  // the ranks that others of the row reach through this one
  std::vector<Words> told_;     // to each rank of the row: the longest block, then those that go through it
  std::vector<Words> heard_;    // from each rank of the row, likewise
  std::vector<std::vector<Words>> column_told_;  // by column and row: the row's longest block, then its ranks' blocks
  std::vector<std::vector<Words>> column_heard_;
  std::vector<Buffer> row_recvs_;     // of a piece, from each rank of the row
  std::vector<Buffer> column_recvs_;  // of a piece, from each row
};

}  // namespace holmes
