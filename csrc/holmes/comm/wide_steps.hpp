// The operations of a wide group, each as steps on its rows and columns.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "holmes/comm/grid.hpp"
#include "holmes/comm/hierarchical_chains.hpp"
#include "holmes/comm/host_communicator.hpp"
#include "holmes/comm/step_queue.hpp"

namespace holmes {

// The communicators that a wide one is made of. Their ranks are numbered by index and by row; messages speak of the
// whole's.
struct WideParts {
  struct Column {
    int number = 0;
    std::shared_ptr<HostCommunicator> part{};
  };

  Grid grid;
  int rank = 0;
  std::string name{};  // of the whole
  std::shared_ptr<HostCommunicator> row{};
  std::vector<Column> columns{};  // as Grid::columns_of
  std::shared_ptr<ScratchPool> scratch = std::make_shared<ScratchPool>();

  int own_row() const { return grid.row_of(rank); }
  int own_index() const { return grid.index_of(rank); }
  // Whether this rank only stands in for another one there.
  bool stands_in(const Column& column) const { return column.number != own_index(); }
  // Ends all of them; does not run callbacks in the calling thread.
  void fail(const Failure& failure) const;
};

// Makes the steps of one operation. All ranks of the group do so with matching arguments. In each, every rank takes
// part in its row first and then in its columns: when a column's step is done, all ranks have entered the operation.
class WideSteps {
public:
  // `deadline`: of the first step; the columns' comes a little later, as only the ranks beside one that is missing can
  // name it.
  WideSteps(std::shared_ptr<const WideParts> parts, std::shared_ptr<const WholeCall> whole, Clock::time_point deadline)
      : parts_(std::move(parts)), whole_(std::move(whole)), deadline_(deadline) {}

  StepList barrier() const;
  // Few bytes: all_reduce of all in the row, then in the column. More: reduce-scatter in the row, all_reduce of the
  // shares in the columns, all-gather in the row.
  StepList all_reduce(const Buffer& data, ReduceOp op) const;
  StepList broadcast(const Buffer& data, int root) const;
  // Piece by piece: to the row's rank in the root's column, then to the root.
  StepList reduce(const Buffer& data, int root, ReduceOp op) const;
  // Piece by piece: what goes to a column is reduced in the row, on the rank in that column, and then in the column.
  StepList reduce_scatter(const Buffer& output, const std::vector<Buffer>& inputs, ReduceOp op) const;
  // All-gather in the row; then, piece by piece, of what the rows have, in the columns.
  StepList all_gather(const std::vector<Buffer>& outputs, const Buffer& input) const;
  // Block by block, through the rank of the sender's row that is in the receiver's column. Also gather and scatter,
  // with empty blocks.
  StepList exchange(const std::vector<Buffer>& outputs, const std::vector<Buffer>& inputs) const;

private:
  // When it is due, in the order of the steps.
  enum class Hop { row = 0, column = 1, last = 2 };
  CallOptions call(const StepList& list, Hop hop, bool is_alone = true) const;
  CallOptions averaging_call(const StepList& list, Hop hop) const;
  // Submits what `make(column, call)` makes for each column.
  template <typename Make>
  void in_columns(StepList& list, const Make& make) const;
  StepList small_all_reduce(const Buffer& data, ReduceOp op) const;
  Buffer take(std::size_t count, DType dtype) const { return parts_->scratch->take(count, dtype); }

  std::shared_ptr<const WideParts> parts_;
  std::shared_ptr<const WholeCall> whole_;
  Clock::time_point deadline_;
};

}  // namespace holmes
