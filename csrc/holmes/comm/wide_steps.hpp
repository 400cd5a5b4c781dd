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

struct WideParts;

// A row or a column: a mesh, or, where it has many ranks, in rows and columns itself. Its ranks are numbered by index
// or by row; messages speak of the whole's. What it is asked for becomes a work of the step that runs, or steps after
// it.
struct WidePart {
  std::shared_ptr<HostCommunicator> mesh{};  // null: wide
  std::shared_ptr<WideParts> wide{};         // null: a mesh

  void barrier(StepList& list, const CallOptions& call) const;
  void all_reduce(StepList& list, const Buffer& data, ReduceOp op, const CallOptions& call) const;
  void reduce_scatter(StepList& list, const Buffer& output, const std::vector<Buffer>& inputs, ReduceOp op,
                      const CallOptions& call) const;
  void all_gather(StepList& list, const std::vector<Buffer>& outputs, const Buffer& input,
                  const CallOptions& call) const;
  void broadcast(StepList& list, const Buffer& data, int root, const CallOptions& call) const;
  void reduce(StepList& list, const Buffer& data, int root, ReduceOp op, const CallOptions& call) const;
  void all_to_all(StepList& list, const std::vector<Buffer>& outputs, const std::vector<Buffer>& inputs,
                  const CallOptions& call) const;
};

// What a wide group is made of, or one of its parts.
struct WideParts {
  struct Column {
    int number = 0;
    WidePart part{};
  };
  // A mesh that has a certain rank, and that rank's number in it.
  struct Place {
    HostCommunicator* mesh = nullptr;  // null: none has it
    int rank = 0;
  };

  Grid grid;
  int rank = 0;
  std::string name{};          // of the whole
  std::vector<int> members{};  // each rank's number in the whole
  std::vector<int> labels{};   // what messages call it
  WidePart row{};
  std::vector<Column> columns{};  // as Grid::columns_of
  std::shared_ptr<ScratchPool> scratch = std::make_shared<ScratchPool>();

  int own_row() const { return grid.row_of(rank); }
  int own_index() const { return grid.index_of(rank); }
  int label(int one) const { return labels[static_cast<std::size_t>(one)]; }
  // Whether this rank only stands in for another one there.
  bool stands_in(const Column& column) const { return column.number != own_index(); }
  // `visit(mesh)` for those that were made. Takes no memory.
  template <typename Visit>
  void for_each_mesh(const Visit& visit) const;
  int mesh_count() const {
    int count = 0;
    for_each_mesh([&count](const HostCommunicator&) { ++count; });
    return count;
  }
  // Where this rank reaches another one directly.
  Place place_of(int other) const;
};

template <typename Visit>
void WideParts::for_each_mesh(const Visit& visit) const {
  const auto visit_part = [&](const WidePart& part) {
    if (part.mesh) visit(*part.mesh);
    if (part.wide) part.wide->for_each_mesh(visit);
  };
  visit_part(row);
  for (const Column& column : columns) visit_part(column.part);
}

// Makes the steps of one operation. All ranks of the group do so with matching arguments. In each, every rank takes
// part in its row first and then in its columns: when a column's step is done, all ranks have entered the operation.
class WideSteps {
public:
  // `deadline`: of the first step; the columns' comes a little later, so that the ranks beside one that is missing name
  // it and others need not ask them. `average_over`: ranks.
  WideSteps(std::shared_ptr<const WideParts> parts, std::shared_ptr<const WholeCall> whole, Clock::time_point deadline,
            int average_over)
      : parts_(std::move(parts)), whole_(std::move(whole)), deadline_(deadline), average_over_(average_over) {}
  // Of a part, where it is wide, as a step of the whole's.
  WideSteps(std::shared_ptr<const WideParts> part, const CallOptions& call);

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
  // `ask(column, call)` for each.
  template <typename Ask>
  void in_columns(StepList& list, const Ask& ask) const;
  StepList small_all_reduce(const Buffer& data, ReduceOp op) const;
  Buffer take(std::size_t count, DType dtype) const { return parts_->scratch->take(count, dtype); }

  std::shared_ptr<const WideParts> parts_;
  std::shared_ptr<const WholeCall> whole_;
  Clock::time_point deadline_;
  int average_over_;
};

}  // namespace holmes
