// Grid: the ranks of a wide group in rows and columns.
#pragma once

#include <vector>

namespace holmes {

// Rows are runs of consecutive ranks, about as many as columns; the first ones may be longer than the others by one.
// Every column has one rank of each row: in the last one the first rank of a short row stands in for the one that the
// row has not, so that from any row to any rank it is one step. Immutable.
class Grid {
public:
  static constexpr int least_ranks = 4;

  // Of `least_ranks` ranks or more.
  explicit Grid(int size);

  int size() const { return size_; }
  int rows() const { return rows_; }
  int columns() const { return least_ + (longer_ > 0); }
  // The ranks of the shortest row.
  int least_row_size() const { return least_; }
  bool is_uneven() const { return longer_ > 0; }
  int row_size(int row) const { return least_ + (row < longer_); }
  int row_of(int rank) const;
  // Its place in the row, which is its column's number.
  int index_of(int rank) const { return rank - first_of(row_of(rank)); }
  bool has(int row, int column) const { return column < row_size(row); }
  // The index in `row` of its rank in `column`.
  int index_in(int row, int column) const { return has(row, column) ? column : 0; }
  int rank_at(int row, int column) const { return first_of(row) + index_in(row, column); }
  std::vector<int> row_members(int row) const;
  // By row.
  std::vector<int> column_members(int column) const;
  // The columns that `rank` is in: its own, then the one in which it stands in for another.
  std::vector<int> columns_of(int rank) const;
  // The ranks that are reached from `row` through its rank of this index.
  std::vector<int> reached_through(int row, int index) const;

private:
  int first_of(int row) const { return row * least_ + (row < longer_ ? row : longer_); }

  int size_;
  int rows_;
  int least_;
  int longer_;  // so many rows, the first ones, have one rank more
};

}  // namespace holmes
