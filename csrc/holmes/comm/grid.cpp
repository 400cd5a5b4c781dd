#include "holmes/comm/grid.hpp"

namespace holmes {
namespace {

// About the square root: a little less where all rows have one length then.
int rows_for(int size) {
  int root = 1;
  while ((root + 1) <= size / (root + 1)) ++root;
  for (int rows = root; rows >= 2 && 4 * rows >= 3 * root; --rows)
    if (size % rows == 0) return rows;
  return root;
}

}  // namespace

Grid::Grid(int size) : size_(size), rows_(rows_for(size)), least_(size / rows_), longer_(size % rows_) {}

int Grid::row_of(int rank) const {
  const int in_longer = longer_ * (least_ + 1);
  return rank < in_longer ? rank / (least_ + 1) : longer_ + (rank - in_longer) / least_;
}

std::vector<int> Grid::row_members(int row) const {
  std::vector<int> ranks;
  for (int index = 0; index < row_size(row); ++index) ranks.push_back(rank_at(row, index));
  return ranks;
}

std::vector<int> Grid::column_members(int column) const {
  std::vector<int> ranks;
  for (int row = 0; row < rows_; ++row) ranks.push_back(rank_at(row, column));
  return ranks;
}

std::vector<int> Grid::columns_of(int rank) const {
  std::vector<int> numbers{index_of(rank)};
  if (numbers.front() == 0 && !has(row_of(rank), columns() - 1)) numbers.push_back(columns() - 1);
  return numbers;
}

std::vector<int> Grid::reached_through(int row, int index) const {
  std::vector<int> ranks;
  for (const int column : columns_of(rank_at(row, index)))
    for (int other = 0; other < rows_; ++other)
      if (has(other, column)) ranks.push_back(rank_at(other, column));
  return ranks;
}

}  // namespace holmes
