#include "holmes/comm/hierarchy.hpp"

#include <algorithm>
#include <array>
#include <map>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

// More shorten only what does not overlap, the first piece's reduce-scatter and the last one's all-gather, to a
// thirty-second.
constexpr std::size_t max_chain_pieces = 32;
// Each round is a message more one after the other.
constexpr int most_rounds = 4;
// Cuts fall between cache lines.
constexpr std::size_t line_bytes = 64;

}  // namespace

Run equal_part(const Run& whole, std::size_t parts, std::size_t index, DType dtype) {
  const std::size_t line = line_bytes / size_bytes(dtype);
  const std::size_t step = ((whole.count + parts - 1) / parts + line - 1) / line * line;
  const std::size_t begin = std::min(whole.count, index * step);
  const std::size_t end = std::min(whole.count, begin + step);
  return {whole.begin + begin, end - begin};
}

Hierarchy::Hierarchy(const std::vector<int>& cluster_of, int rank) : rank_(rank) {
  std::map<int, int> numbers;
  for (std::size_t r = 0; r < cluster_of.size(); ++r) {
    const auto [found, is_new] = numbers.try_emplace(cluster_of[r], static_cast<int>(members_.size()));
    if (is_new) members_.emplace_back();
    auto& members = members_[static_cast<std::size_t>(found->second)];
    cluster_.push_back(found->second);
    index_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(r));
  }
  const auto [smallest, largest] = std::minmax_element(
      members_.begin(), members_.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  share_count_ = static_cast<int>(smallest->size());
  equal_ = smallest->size() == largest->size();
  rounds_ = static_cast<int>((largest->size() + smallest->size() - 1) / smallest->size());
}

int Hierarchy::rounds(int cluster) const {
  return (static_cast<int>(members(cluster).size()) + share_count_ - 1) / share_count_;
}

std::optional<int> Hierarchy::crossing_rank(int cluster, int owner_index, int round) const {
  const auto index = static_cast<std::size_t>(owner_index + round * share_count_);
  if (owner_index >= share_count_ || index >= members(cluster).size()) return std::nullopt;
  return members(cluster)[index];
}

bool Hierarchy::saves_crossings(const std::vector<Buffer>& blocks) const {
  if (rounds_ > most_rounds) return false;
  std::size_t all = 0;
  std::vector<std::size_t> of_cluster(members_.size());
  std::vector<std::size_t> with_owner(cluster_.size());  // by the owner's rank
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
    const std::size_t count = blocks[rank].count;
    all += count;
    of_cluster[static_cast<std::size_t>(cluster_[rank])] += count;
    const int owner = *crossing_rank(cluster_[rank], owner_index(static_cast<int>(rank)), 0);
    with_owner[static_cast<std::size_t>(owner)] += count;
  }
  std::size_t flat = 0;
  std::size_t here = 0;
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
    const auto cluster = static_cast<std::size_t>(cluster_[rank]);
    flat = std::max({flat, all - of_cluster[cluster], blocks[rank].count * (blocks.size() - members_[cluster].size())});
    if (index_[rank] >= share_count_) continue;
    std::size_t others = 0;
    for (const auto& members : members_)
      others += with_owner[static_cast<std::size_t>(members[static_cast<std::size_t>(index_[rank])])];
    here = std::max({here, with_owner[rank] * (members_.size() - 1), others - with_owner[rank]});
  }
  return here < flat;
}

std::vector<int> Hierarchy::counterparts() const {
  std::vector<int> ranks;
  for (const auto& members : members_) ranks.push_back(members[static_cast<std::size_t>(index())]);
  return ranks;
}

Run Hierarchy::share(const Run& whole, int index, DType dtype) const {
  if (index >= share_count_) return {whole.begin + whole.count, 0};
  return equal_part(whole, static_cast<std::size_t>(share_count_), static_cast<std::size_t>(index), dtype);
}

std::vector<Run> cut_into_pieces(std::size_t count, DType dtype) {
  const std::size_t pieces = std::clamp<std::size_t>(count * size_bytes(dtype) / min_piece_bytes, 1, max_chain_pieces);
  std::vector<Run> runs;
  for (std::size_t i = 0; i < pieces; ++i) {
    const Run run = equal_part({0, count}, pieces, i, dtype);
    if (run.count || runs.empty()) runs.push_back(run);
  }
  return runs;
}

std::size_t count_pieces(const std::vector<Buffer>& blocks) {
  const auto largest = std::ranges::max_element(blocks, {}, &Buffer::count);
  return cut_into_pieces(largest->count, largest->dtype).size();
}

Buffer slice(const Buffer& whole, const Run& run) {
  return {whole.begin() + run.begin * size_bytes(whole.dtype), run.count, whole.dtype, whole.owner};
}

namespace {

constexpr std::size_t first_bytes = 256;
constexpr std::size_t last_bytes = 4 * 1024 * 1024;
constexpr std::size_t growth = 4;
constexpr std::size_t first_trend_bytes = 4 * 1024;  // before, it is the time of messages, which says nothing
constexpr std::size_t min_sizes = 3;                 // what a trend needs
constexpr int rounds = 2;                            // the better one counts: noise only adds
// Small ones are called in a row, as links let a first few packets through at once that they are too slow for.
constexpr std::int64_t row_ns = 8'000'000;
constexpr std::int64_t most_calls = 16;
constexpr auto budget = std::chrono::milliseconds(200);
// A lead smaller than a tenth is taken for noise.
constexpr std::int64_t lead_numerator = 9;
constexpr std::int64_t lead_denominator = 10;

struct Times {
  std::int64_t flat_ns = 0;
  std::int64_t hierarchical_ns = 0;
  std::int64_t elapsed_ns = 0;
};

void reduce_to_largest(Communicator& flat, std::int64_t* values, std::size_t count, const CallOptions& call) {
  flat.all_reduce({values, count, DType::int64, nullptr}, ReduceOp::max, call)->wait();
}

std::int64_t nanoseconds_of(const std::function<void()>& body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

// Where the hierarchical form, which was behind at the last size and is ahead now, overtook the flat one.
std::uint64_t overtaking_bytes(const Times& before, const Times& now, std::size_t bytes) {
  const double lag_ns = static_cast<double>(before.hierarchical_ns - before.flat_ns);
  const double lead_ns = static_cast<double>(now.flat_ns - now.hierarchical_ns);
  const double before_bytes = static_cast<double>(bytes / growth);
  if (lag_ns <= 0) return bytes;  // by less than counts
  return static_cast<std::uint64_t>(before_bytes +
                                    (static_cast<double>(bytes) - before_bytes) * lag_ns / (lag_ns + lead_ns));
}

// Where the line through the last two measurements of the hierarchical form falls below the flat one's.
std::uint64_t crossing_bytes(const Times& before, const Times& now, std::size_t bytes) {
  const double step_bytes = static_cast<double>(bytes - bytes / growth);
  const double gain_ns_per_byte =
      static_cast<double>((now.flat_ns - before.flat_ns) - (now.hierarchical_ns - before.hierarchical_ns)) / step_bytes;
  if (gain_ns_per_byte <= 0) return never_hierarchical;
  const double lag_ns = static_cast<double>(std::max<std::int64_t>(now.hierarchical_ns - now.flat_ns, 0));
  const double crossing = static_cast<double>(bytes) + lag_ns / gain_ns_per_byte;
  // Far beyond what was measured the trend says nothing.
  constexpr double trend_factor = 64;
  return crossing > trend_factor * static_cast<double>(bytes) ? never_hierarchical
                                                              : static_cast<std::uint64_t>(crossing);
}

}  // namespace

std::optional<std::uint64_t> agree_given_bytes(Communicator& flat, const std::optional<std::uint64_t>& given) {
  const auto size = static_cast<std::size_t>(flat.size());
  std::vector<std::uint64_t> all(2 * size);  // whether given, and what
  std::vector<Buffer> outputs;
  for (std::size_t r = 0; r < size; ++r) outputs.push_back({&all[2 * r], 2, DType::int64, nullptr});
  std::array<std::uint64_t, 2> own = {given.has_value(), given.value_or(0)};
  flat.all_gather(std::move(outputs), {own.data(), own.size(), DType::int64, nullptr})->wait();
  std::optional<std::size_t> first;
  for (std::size_t r = 0; r < size; ++r) {
    if (!all[2 * r]) continue;
    if (!first) first = r;
    if (all[2 * r + 1] != all[2 * *first + 1])
      throw UsageError("communicator '" + flat.name() + "': rank " + std::to_string(*first) +
                       " wants operations hierarchical from " + std::to_string(all[2 * *first + 1]) +
                       " bytes on, rank " + std::to_string(r) + " from " + std::to_string(all[2 * r + 1]) +
                       "; give all ranks the same value (HOLMES_HIERARCHICAL_MIN_BYTES)");
  }
  return first ? std::optional(all[2 * *first + 1]) : std::nullopt;
}

std::uint64_t measure_hierarchical_min_bytes(PartCommunicator& flat,
                                             const std::function<void(const Buffer&)>& hierarchical, Duration timeout) {
  CallOptions call;
  call.timeout = timeout;
  std::vector<float> values(last_bytes / sizeof(float));
  const auto start = Clock::now();
  std::optional<Times> before;
  std::size_t sizes = 0;
  for (std::size_t bytes = flat.is_far() ? first_trend_bytes : first_bytes;; bytes *= growth) {
    const Buffer data{values.data(), bytes / sizeof(float), DType::float32, nullptr};
    Times now{INT64_MAX, INT64_MAX, 0};
    const auto measure = [&](std::int64_t calls) {
      const auto one_of = [&](const std::function<void()>& body) {
        flat.barrier(call)->wait();
        return nanoseconds_of([&] {
                 for (std::int64_t i = 0; i < calls; ++i) body();
               }) /
               calls;
      };
      const auto flat_ns = one_of([&] { flat.all_reduce(data, ReduceOp::sum, call)->wait(); });
      const auto hierarchical_ns = one_of([&] { hierarchical(data); });
      now.flat_ns = std::min(now.flat_ns, flat_ns);
      now.hierarchical_ns = std::min(now.hierarchical_ns, hierarchical_ns);
    };
    measure(1);
    std::int64_t once_ns = std::max<std::int64_t>(now.flat_ns + now.hierarchical_ns, 1);
    reduce_to_largest(flat, &once_ns, 1, call);
    const std::int64_t calls = std::clamp<std::int64_t>(row_ns / once_ns, 1, most_calls);
    if (calls > 1) now = {INT64_MAX, INT64_MAX, 0};
    for (int round = calls > 1 ? 0 : 1; round < rounds; ++round) measure(calls);
    now.elapsed_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    std::array<std::int64_t, 3> agreed = {now.flat_ns, now.hierarchical_ns, now.elapsed_ns};
    reduce_to_largest(flat, agreed.data(), agreed.size(), call);
    now = {agreed[0], agreed[1], agreed[2]};
    if (bytes >= first_trend_bytes) ++sizes;
    if (now.hierarchical_ns * lead_denominator < now.flat_ns * lead_numerator)
      return before ? overtaking_bytes(*before, now, bytes) : bytes;
    const bool is_spent = std::chrono::nanoseconds(now.elapsed_ns) > budget && sizes >= min_sizes;
    if (is_spent || bytes == last_bytes) return before ? crossing_bytes(*before, now, bytes) : never_hierarchical;
    before = now;
  }
}

}  // namespace holmes
