#include "holmes/comm/wide_steps.hpp"

#include <algorithm>
#include <cstring>

#include "holmes/comm/joined.hpp"
#include "holmes/comm/routed_exchange.hpp"

namespace holmes {
namespace {

// Who waits for a missing rank itself is to name it before others ask: longer than two probes (failure_detector.cpp).
constexpr auto hop_grace = std::chrono::milliseconds(500);
// Up to so many bytes, a step less is worth more than fewer bytes.
constexpr std::size_t most_two_step_bytes = 32 * 1024;
// Of partial results, for an operation.
constexpr std::size_t most_scratch_bytes = 32 * 1024 * 1024;
constexpr std::size_t most_piece_bytes = 8 * 1024 * 1024;

// Contributions were divided in the rows (CallOptions::average_over).
ReduceOp between_rows(ReduceOp op) { return op == ReduceOp::avg ? ReduceOp::sum : op; }

std::vector<Run> cut(std::size_t count, std::size_t most) {
  std::vector<Run> runs;
  do {
    const std::size_t begin = runs.empty() ? 0 : runs.back().begin + runs.back().count;
    runs.push_back({begin, std::min(count - begin, most)});
  } while (runs.back().begin + runs.back().count < count);
  return runs;
}

// What of `run` a buffer has.
Buffer clipped(const Buffer& buffer, const Run& run) {
  const std::size_t begin = std::min(run.begin, buffer.count);
  return slice(buffer, {begin, std::min(run.begin + run.count, buffer.count) - begin});
}

void copy(const Buffer& to, const Buffer& from) {
  if (from.bytes() > 0) std::memcpy(to.data, from.data, from.bytes());
}

WideParts::Place place_in(const WidePart& part, int rank) {
  return part.mesh ? WideParts::Place{part.mesh.get(), rank} : part.wide->place_of(rank);
}

}  // namespace

void WidePart::barrier(StepList& list, const CallOptions& call) const {
  if (mesh)
    list.works.push_back(mesh->barrier(call));
  else
    list.add_next(WideSteps(wide, call).barrier());
}

void WidePart::all_reduce(StepList& list, const Buffer& data, ReduceOp op, const CallOptions& call) const {
  if (mesh)
    list.works.push_back(mesh->all_reduce(data, op, call));
  else
    list.add_next(WideSteps(wide, call).all_reduce(data, op));
}

void WidePart::reduce_scatter(StepList& list, const Buffer& output, const std::vector<Buffer>& inputs, ReduceOp op,
                              const CallOptions& call) const {
  if (mesh)
    list.works.push_back(mesh->reduce_scatter(output, inputs, op, call));
  else
    list.add_next(WideSteps(wide, call).reduce_scatter(output, inputs, op));
}

void WidePart::all_gather(StepList& list, const std::vector<Buffer>& outputs, const Buffer& input,
                          const CallOptions& call) const {
  if (mesh)
    list.works.push_back(mesh->all_gather(outputs, input, call));
  else
    list.add_next(WideSteps(wide, call).all_gather(outputs, input));
}

void WidePart::broadcast(StepList& list, const Buffer& data, int root, const CallOptions& call) const {
  if (mesh)
    list.works.push_back(mesh->broadcast(data, root, call));
  else
    list.add_next(WideSteps(wide, call).broadcast(data, root));
}

void WidePart::reduce(StepList& list, const Buffer& data, int root, ReduceOp op, const CallOptions& call) const {
  if (mesh)
    list.works.push_back(mesh->reduce(data, root, op, call));
  else
    list.add_next(WideSteps(wide, call).reduce(data, root, op));
}

void WidePart::all_to_all(StepList& list, const std::vector<Buffer>& outputs, const std::vector<Buffer>& inputs,
                          const CallOptions& call) const {
  if (mesh)
    list.works.push_back(mesh->all_to_all(outputs, inputs, call));
  else
    list.add_next(WideSteps(wide, call).exchange(outputs, inputs));
}

WideParts::Place WideParts::place_of(int other) const {
  const int its_row = grid.row_of(other);
  if (its_row == own_row()) return place_in(row, grid.index_of(other));
  const auto column =
      std::ranges::find_if(columns, [&](const Column& known) { return grid.rank_at(its_row, known.number) == other; });
  return column == columns.end() ? Place{} : place_in(column->part, its_row);
}

WideSteps::WideSteps(std::shared_ptr<const WideParts> part, const CallOptions& call)
    : WideSteps(part, call.part_of, Clock::now() + *call.timeout, call.average_over.value_or(part->grid.size())) {}

CallOptions WideSteps::call(const StepList& list, Hop hop, bool is_alone) const {
  const auto due = deadline_ + static_cast<int>(hop) * hop_grace;
  CallOptions options;
  // Too late: the operation fails with its own message, which says whom it waits for.
  options.timeout = std::max<Duration>(due - Clock::now(), std::chrono::nanoseconds(1));
  options.async = !(list.is_here && is_alone);
  options.part_of = whole_;
  return options;
}

CallOptions WideSteps::averaging_call(const StepList& list, Hop hop) const {
  CallOptions options = call(list, hop);
  options.average_over = average_over_;
  return options;
}

template <typename Ask>
void WideSteps::in_columns(StepList& list, const Ask& ask) const {
  for (const auto& column : parts_->columns) ask(column, call(list, Hop::column, parts_->columns.size() == 1));
}

StepList WideSteps::barrier() const {
  StepList list;
  list.steps.push_back(
      [self = *this](StepList& steps) { self.parts_->row.barrier(steps, self.call(steps, Hop::row)); });
  list.steps.push_back([self = *this](StepList& steps) {
    self.in_columns(steps,
                    [&](const auto& column, const CallOptions& options) { column.part.barrier(steps, options); });
  });
  return list;
}

StepList WideSteps::small_all_reduce(const Buffer& data, ReduceOp op) const {
  StepList list;
  list.steps.push_back([self = *this, data, op](StepList& steps) {
    self.parts_->row.all_reduce(steps, data, op, self.averaging_call(steps, Hop::row));
  });
  list.steps.push_back([self = *this, data, op](StepList& steps) {
    std::vector<Buffer> results;
    for (const auto& column : self.parts_->columns) {
      results.push_back(self.parts_->stands_in(column) ? self.take(data.count, data.dtype) : data);
      if (results.size() > 1) copy(results.back(), data);  // before the first one changes it
    }
    auto result = results.begin();
    self.in_columns(steps, [&](const auto& column, const CallOptions& options) {
      column.part.all_reduce(steps, *result++, between_rows(op), options);
    });
  });
  return list;
}

StepList WideSteps::all_reduce(const Buffer& data, ReduceOp op) const {
  if (data.bytes() <= most_two_step_bytes) return small_all_reduce(data, op);
  const Grid& grid = parts_->grid;
  const auto shares = static_cast<std::size_t>(grid.least_row_size());
  std::vector<Buffer> parts;
  for (int index = 0; index < grid.row_size(parts_->own_row()); ++index)
    parts.push_back(index < grid.least_row_size()
                        ? slice(data, equal_part({0, data.count}, shares, static_cast<std::size_t>(index), data.dtype))
                        : slice(data, {data.count, 0}));
  const Buffer own = parts[static_cast<std::size_t>(parts_->own_index())];
  StepList list;
  list.steps.push_back([self = *this, parts, own, op](StepList& steps) {
    self.parts_->row.reduce_scatter(steps, own, parts, op, self.averaging_call(steps, Hop::row));
  });
  if (parts_->own_index() < grid.least_row_size())
    list.steps.push_back([self = *this, own, op](StepList& steps) {
      self.parts_->columns.front().part.all_reduce(steps, own, between_rows(op), self.call(steps, Hop::column));
    });
  list.steps.push_back([self = *this, parts, own](StepList& steps) {
    self.parts_->row.all_gather(steps, parts, own, self.call(steps, Hop::last));
  });
  return list;
}

StepList WideSteps::broadcast(const Buffer& data, int root) const {
  const Grid& grid = parts_->grid;
  const int root_row = grid.row_of(root);
  StepList list;
  list.steps.push_back([self = *this, data, root_row, index = grid.index_of(root)](StepList& steps) {
    const CallOptions options = self.call(steps, Hop::row);
    const WidePart& row = self.parts_->row;
    if (self.parts_->own_row() == root_row)
      row.broadcast(steps, data, index, options);
    else
      row.barrier(steps, options);
  });
  // Who stands in for another takes it a second time, in pieces.
  const auto pieces = cut(data.count, most_piece_bytes / size_bytes(data.dtype));
  for (const Run& piece : pieces)
    list.steps.push_back([self = *this, data, piece, root_row](StepList& steps) {
      const auto& parts = *self.parts_;
      const bool is_source = parts.own_row() == root_row;
      const Run whole{0, data.count};
      const bool is_first = piece.begin == 0;
      for (const auto& column : parts.columns) {
        const bool is_in_pieces = parts.grid.is_uneven() && column.number == parts.grid.columns() - 1;
        if (!is_in_pieces && !is_first) continue;
        Buffer part = slice(data, is_in_pieces ? piece : whole);
        if (parts.stands_in(column) && !is_source) part = self.take(part.count, part.dtype);
        const CallOptions options = self.call(steps, Hop::column, parts.columns.size() == 1);
        column.part.broadcast(steps, part, root_row, options);
      }
    });
  return list;
}

StepList WideSteps::reduce(const Buffer& data, int root, ReduceOp op) const {
  const Grid& grid = parts_->grid;
  const int root_row = grid.row_of(root);
  const int root_column = grid.index_of(root);
  const int target = grid.index_in(parts_->own_row(), root_column);
  const bool is_target = parts_->own_index() == target;
  StepList list;
  for (const Run& piece : cut(data.count, most_piece_bytes / size_bytes(data.dtype))) {
    const auto partial = std::make_shared<Buffer>();
    list.steps.push_back([self = *this, part = slice(data, piece), partial, op, target, is_target,
                          is_root = parts_->rank == root](StepList& steps) {
      *partial = part;
      if (is_target && !is_root) {  // only the root's data may change
        *partial = self.take(part.count, part.dtype);
        copy(*partial, part);
      }
      self.parts_->row.reduce(steps, *partial, target, op, self.averaging_call(steps, Hop::row));
    });
    list.steps.push_back(
        [self = *this, partial, op, root_row, root_column, is_first = piece.begin == 0](StepList& steps) {
          const bool is_alone = self.parts_->columns.size() == 1;
          for (const auto& column : self.parts_->columns) {
            const CallOptions options = self.call(steps, Hop::column, is_alone);
            if (column.number == root_column)
              column.part.reduce(steps, *partial, root_row, between_rows(op), options);
            else if (is_first)
              column.part.barrier(steps, options);
          }
          if (steps.works.empty()) *partial = {};
        });
  }
  return list;
}

StepList WideSteps::reduce_scatter(const Buffer& output, const std::vector<Buffer>& inputs, ReduceOp op) const {
  const Grid& grid = parts_->grid;
  const DType dtype = output.dtype;
  std::size_t longest = 0;
  for (const Buffer& input : inputs) longest = std::max(longest, input.count);
  const std::size_t block_bytes = static_cast<std::size_t>(grid.size()) * size_bytes(dtype);
  StepList list;
  for (const Run& piece : cut(longest, std::max<std::size_t>(most_scratch_bytes / block_bytes, 1))) {
    const auto partial = std::make_shared<Joined>();  // what this rank passes on, reduced over its row
    list.steps.push_back([self = *this, inputs, piece, partial, op, dtype](StepList& steps) {
      const auto& parts = *self.parts_;
      std::vector<Buffer> packed;
      for (int index = 0; index < parts.grid.row_size(parts.own_row()); ++index) {
        std::vector<Buffer> blocks;
        for (const int rank : parts.grid.reached_through(parts.own_row(), index))
          blocks.push_back(clipped(inputs[static_cast<std::size_t>(rank)], piece));
        const Joined joined(std::move(blocks), dtype);
        const Buffer whole = joined.in_one(*parts.scratch);
        if (index == parts.own_index()) *partial = joined.like(self.take(whole.count, dtype));
        packed.push_back(whole);
      }
      parts.row.reduce_scatter(steps, partial->whole(), packed, op, self.averaging_call(steps, Hop::row));
    });
    list.steps.push_back([self = *this, part = clipped(output, piece), partial, op, dtype](StepList& steps) {
      const auto& parts = *self.parts_;
      auto block = partial->blocks().begin();
      self.in_columns(steps, [&](const auto& column, const CallOptions& options) {
        std::vector<Buffer> blocks;
        for (int row = 0; row < parts.grid.rows(); ++row)
          blocks.push_back(parts.grid.has(row, column.number) ? *block++ : no_data(dtype));
        column.part.reduce_scatter(steps, parts.stands_in(column) ? no_data(dtype) : part, blocks, between_rows(op),
                                   options);
      });
    });
  }
  return list;
}

StepList WideSteps::all_gather(const std::vector<Buffer>& outputs, const Buffer& input) const {
  const Grid& grid = parts_->grid;
  // What each row has.
  const auto rows = std::make_shared<std::vector<Joined>>();
  std::size_t longest = 0;
  for (int row = 0; row < grid.rows(); ++row) {
    std::vector<Buffer> blocks;
    for (const int rank : grid.row_members(row)) blocks.push_back(outputs[static_cast<std::size_t>(rank)]);
    rows->push_back(Joined(std::move(blocks), input.dtype));
    longest = std::max(longest, rows->back().count());
  }
  StepList list;
  list.steps.push_back([self = *this, rows, input](StepList& steps) {
    const auto& parts = *self.parts_;
    parts.row.all_gather(steps, (*rows)[static_cast<std::size_t>(parts.own_row())].blocks(), input,
                         self.call(steps, Hop::row));
  });
  const std::size_t row_bytes = static_cast<std::size_t>(grid.rows()) * size_bytes(input.dtype);
  for (const Run& piece : cut(longest, std::max<std::size_t>(most_scratch_bytes / row_bytes, 1))) {
    const auto slices = std::make_shared<std::vector<Joined>>();
    const auto wholes = std::make_shared<std::vector<Buffer>>();
    list.steps.push_back([self = *this, rows, piece, slices, wholes, dtype = input.dtype](StepList& steps) {
      const auto& parts = *self.parts_;
      const auto own = static_cast<std::size_t>(parts.own_row());
      for (std::size_t row = 0; row < rows->size(); ++row) {
        slices->push_back((*rows)[row].cut(piece));
        wholes->push_back(row == own ? slices->back().in_one(*parts.scratch)
                                     : slices->back().place_for_one(*parts.scratch));
      }
      self.in_columns(steps, [&](const auto& column, const CallOptions& options) {
        if (!parts.grid.is_uneven() || column.number < parts.grid.columns() - 1)
          return column.part.all_gather(steps, *wholes, (*wholes)[own], options);
        // Who stands in for another needs nothing.
        std::vector<Buffer> sends;
        std::vector<Buffer> recvs;
        for (std::size_t row = 0; row < rows->size(); ++row) {
          const bool is_sent = row != own && parts.grid.has(static_cast<int>(row), column.number);
          sends.push_back(is_sent ? (*wholes)[own] : no_data(dtype));
          recvs.push_back(row == own || parts.stands_in(column) ? no_data(dtype) : (*wholes)[row]);
        }
        column.part.all_to_all(steps, recvs, sends, options);
      });
    });
    list.steps.push_back([slices, wholes, own = static_cast<std::size_t>(parts_->own_row())](StepList&) {
      for (std::size_t row = 0; row < slices->size(); ++row)
        if (row != own) (*slices)[row].take_from((*wholes)[row]);
      slices->clear();
      wholes->clear();
    });
  }
  return list;
}

StepList WideSteps::exchange(const std::vector<Buffer>& outputs, const std::vector<Buffer>& inputs) const {
  const auto routed = std::make_shared<RoutedExchange>(parts_, outputs, inputs);
  StepList list;
  list.steps.push_back(
      [self = *this, routed](StepList& steps) { routed->tell_row(steps, self.call(steps, Hop::row)); });
  list.steps.push_back([self = *this, routed](StepList& steps) {
    routed->tell_columns(steps, self.call(steps, Hop::column, self.parts_->columns.size() == 1));
  });
  list.steps.push_back([self = *this, routed](StepList& steps) {
    const std::size_t pieces = routed->checked_pieces();
    for (std::size_t piece = 0; piece < pieces; ++piece) {
      steps.add_next(
          [self, routed, piece](StepList& later) { routed->send_in_row(later, piece, self.call(later, Hop::last)); });
      steps.add_next([self, routed, piece](StepList& later) {
        routed->send_in_columns(later, piece, self.call(later, Hop::last, self.parts_->columns.size() == 1));
      });
      steps.add_next([routed, piece](StepList&) { routed->take(piece); });
    }
  });
  return list;
}

}  // namespace holmes
