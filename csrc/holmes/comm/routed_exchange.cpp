#include "holmes/comm/routed_exchange.hpp"

#include <algorithm>
#include <cstring>

#include "holmes/comm/wide_steps.hpp"
#include "holmes/core/error.hpp"

namespace holmes {
namespace {

// Of a rank's blocks together, on their way.
constexpr std::uint64_t most_held_bytes = 16 * 1024 * 1024;
constexpr std::uint64_t least_piece_bytes = 4 * 1024;

std::vector<Buffer> buffers_of(std::vector<std::vector<std::uint64_t>>& words) {
  std::vector<Buffer> buffers;
  for (auto& one : words) buffers.push_back({one.data(), one.size(), DType::int64, nullptr});
  return buffers;
}

}  // namespace

RoutedExchange::RoutedExchange(std::shared_ptr<const WideParts> parts, std::vector<Buffer> outputs,
                               std::vector<Buffer> inputs)
    : parts_(std::move(parts)), outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}

bool RoutedExchange::is_own_column(int number) const { return number == parts_->own_index(); }

void RoutedExchange::tell_row(StepList& steps, const CallOptions& call) {
  const Grid& grid = parts_->grid;
  const int row = parts_->own_row();
  std::uint64_t longest = 0;
  for (const Buffer& input : inputs_) longest = std::max<std::uint64_t>(longest, input.bytes());
  passed_on_ = grid.reached_through(row, parts_->own_index());
  for (int index = 0; index < grid.row_size(row); ++index) {
    told_.push_back({longest});
    for (const int rank : grid.reached_through(row, index))
      told_.back().push_back(inputs_[static_cast<std::size_t>(rank)].bytes());
    heard_.push_back(Words(passed_on_.size() + 1));
  }
  parts_->row.all_to_all(steps, buffers_of(heard_), buffers_of(told_), call);
}

void RoutedExchange::tell_columns(StepList& steps, const CallOptions& call) {
  const Grid& grid = parts_->grid;
  std::uint64_t longest = 0;
  for (const Words& words : heard_) longest = std::max(longest, words.front());
  std::size_t next = 1;  // in what each rank of the row has told
  for (const auto& column : parts_->columns) {
    auto& told = column_told_.emplace_back();
    auto& heard = column_heard_.emplace_back();
    for (int row = 0; row < grid.rows(); ++row) {
      told.push_back({longest});
      heard.push_back(Words(1 + (is_own_column(column.number) ? static_cast<std::size_t>(grid.row_size(row)) : 0)));
      if (!grid.has(row, column.number)) continue;
      for (const Words& words : heard_) told.back().push_back(words[next]);
      ++next;
    }
    column.part.all_to_all(steps, buffers_of(heard), buffers_of(told), call);
  }
}

std::uint64_t RoutedExchange::piece_bytes() const {
  return std::max(most_held_bytes / static_cast<std::uint64_t>(parts_->grid.size()), least_piece_bytes);
}

std::uint64_t RoutedExchange::bytes_of(std::uint64_t block_bytes, std::size_t piece) const {
  const std::uint64_t begin = std::min(block_bytes, piece * piece_bytes());
  return std::min(block_bytes - begin, piece_bytes());
}

std::size_t RoutedExchange::checked_pieces() const {
  const Grid& grid = parts_->grid;
  std::uint64_t longest = 0;
  for (int row = 0; row < grid.rows(); ++row) {
    const Words& heard = column_heard_.front()[static_cast<std::size_t>(row)];
    longest = std::max(longest, heard.front());
    for (int index = 0; index < grid.row_size(row); ++index) {
      const int source = grid.rank_at(row, index);
      const std::uint64_t sent = heard[static_cast<std::size_t>(index) + 1];
      const std::uint64_t expected = outputs_[static_cast<std::size_t>(source)].bytes();
      if (sent == expected) continue;
      const int from = parts_->label(source), to = parts_->label(parts_->rank);
      throw MismatchError("communicator '" + parts_->name + "': rank " + std::to_string(from) + " sends " +
                              std::to_string(sent) + " bytes to rank " + std::to_string(to) + ", which expects " +
                              std::to_string(expected) + " from it; the counts of the two sides must be equal",
                          {.rank = to, .peer = from});
    }
  }
  return (longest + piece_bytes() - 1) / piece_bytes();
}

void RoutedExchange::send_in_row(StepList& steps, std::size_t piece, const CallOptions& call) {
  const Grid& grid = parts_->grid;
  const int row = parts_->own_row();
  std::vector<Buffer> sends;
  row_recvs_.clear();
  for (int index = 0; index < grid.row_size(row); ++index) {
    std::uint64_t bytes = 0;
    const auto through = grid.reached_through(row, index);
    for (const int rank : through) bytes += bytes_of(inputs_[static_cast<std::size_t>(rank)].bytes(), piece);
    const Buffer& packed = sends.emplace_back(parts_->scratch->take(bytes, DType::uint8));
    std::byte* to = packed.begin();
    for (const int rank : through) {
      const Buffer& input = inputs_[static_cast<std::size_t>(rank)];
      const std::uint64_t part = bytes_of(input.bytes(), piece);
      if (part > 0) std::memcpy(to, input.begin() + piece * piece_bytes(), part);
      to += part;
    }
    bytes = 0;
    const Words& heard = heard_[static_cast<std::size_t>(index)];
    for (std::size_t i = 1; i < heard.size(); ++i) bytes += bytes_of(heard[i], piece);
    row_recvs_.push_back(parts_->scratch->take(bytes, DType::uint8));
  }
  parts_->row.all_to_all(steps, row_recvs_, sends, call);
}

void RoutedExchange::send_in_columns(StepList& steps, std::size_t piece, const CallOptions& call) {
  const Grid& grid = parts_->grid;
  std::vector<const std::byte*> from;  // the next block from each rank of the row
  for (const Buffer& came : row_recvs_) from.push_back(came.begin());
  std::size_t next = 1;
  for (std::size_t c = 0; c < parts_->columns.size(); ++c) {
    const auto& column = parts_->columns[c];
    std::vector<Buffer> sends;
    std::vector<Buffer> recvs;
    for (int row = 0; row < grid.rows(); ++row) {
      std::uint64_t bytes = 0;
      if (grid.has(row, column.number)) {
        for (const Words& words : heard_) bytes += bytes_of(words[next], piece);
        const Buffer& packed = sends.emplace_back(parts_->scratch->take(bytes, DType::uint8));
        std::byte* to = packed.begin();
        for (std::size_t index = 0; index < from.size(); ++index) {
          const std::uint64_t part = bytes_of(heard_[index][next], piece);
          if (part > 0) std::memcpy(to, from[index], part);
          from[index] += part;
          to += part;
        }
        ++next;
      } else {
        sends.push_back({nullptr, 0, DType::uint8, nullptr});
      }
      bytes = 0;
      const Words& heard = column_heard_[c][static_cast<std::size_t>(row)];
      for (std::size_t i = 1; i < heard.size(); ++i) bytes += bytes_of(heard[i], piece);
      recvs.push_back(parts_->scratch->take(bytes, DType::uint8));
    }
    if (is_own_column(column.number)) column_recvs_ = recvs;
    column.part.all_to_all(steps, recvs, sends, call);
  }
}

void RoutedExchange::take(std::size_t piece) {
  const Grid& grid = parts_->grid;
  for (int row = 0; row < grid.rows(); ++row) {
    const std::byte* from = column_recvs_[static_cast<std::size_t>(row)].begin();
    for (int index = 0; index < grid.row_size(row); ++index) {
      const Buffer& output = outputs_[static_cast<std::size_t>(grid.rank_at(row, index))];
      const std::uint64_t part = bytes_of(output.bytes(), piece);
      if (part > 0) std::memcpy(output.begin() + piece * piece_bytes(), from, part);
      from += part;
    }
  }
  row_recvs_.clear();
  column_recvs_.clear();
}

}  // namespace holmes
