// Compiled once per instruction set (reduce.cmake) into the namespace HOLMES_ISA. See vector.hpp for what it may
// include.
#include <type_traits>

#include "holmes/reduce/kernels.hpp"
#include "holmes/reduce/vector.hpp"

namespace holmes::HOLMES_ISA {
namespace {

struct Sum {
  template <typename V>
  static V combine(V a, V b) {
    return a + b;
  }
};
struct Average : Sum {};  // divided at the end
struct Product {
  template <typename V>
  static V combine(V a, V b) {
    return a * b;
  }
};
struct Min {
  template <typename V>
  static V combine(V a, V b) {
    return minimum(a, b);
  }
};
struct Max {
  template <typename V>
  static V combine(V a, V b) {
    return maximum(a, b);
  }
};
struct And {
  template <typename V>
  static V combine(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <typename V>
  static V combine(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <typename V>
  static V combine(V a, V b) {
    return a ^ b;
  }
};

// One pass over all sources: an element is read from each, combined in registers and written once.
template <typename Element, typename Op>
class Kernel {
public:
  static void run(const Reduction& reduction) { Kernel(reduction).run(); }

private:
  using Packed = typename Element::Packed;
  using Wide = typename Element::Wide;
  static constexpr std::size_t unroll = 4;
  static constexpr std::size_t block_bytes = unroll * sizeof(Packed);

  explicit Kernel(const Reduction& reduction)
      : sources_(reinterpret_cast<const char* const*>(reduction.sources)),
        source_count_(reduction.source_count),
        destination_(static_cast<char*>(reduction.destination)),
        bytes_(reduction.count * Element::element_bytes),
        non_temporal_(reduction.non_temporal_destination),
        total_(static_cast<typename Element::Lane>(reduction.source_total)),
        total_is_power_of_two_((reduction.source_total & (reduction.source_total - 1)) == 0) {}

  void run() {
    std::size_t at = 0;
    if (bytes_ >= 2 * block_bytes) {
      // Aligning the destination keeps its stores within cache lines.
      const std::size_t head = -reinterpret_cast<std::uintptr_t>(destination_) % sizeof(Packed);
      const bool can_align = head % Element::element_bytes == 0;
      if (can_align && head > 0) {
        partial(0, head);
        at = head;
      }
      if (can_align && non_temporal_) {
        at = blocks<true>(at);
        fence_non_temporal();
      } else {
        at = blocks<false>(at);
      }
    }
    for (; at + sizeof(Packed) <= bytes_; at += sizeof(Packed)) block<1, false>(at);
    if (at < bytes_) partial(at, bytes_ - at);
  }

  // Whole blocks from `at` on; returns where they end. What decides the speed of training, floating point sums of up to
  // 8 sources, has a loop for each number of sources (measured: 1.6 times as fast, at 3 times the code).
  template <bool non_temporal>
  std::size_t blocks(std::size_t at) {
    if constexpr (std::is_base_of_v<Sum, Op> && std::is_floating_point_v<typename Element::Lane>)
      switch (source_count_) {
        case 2:
          return blocks<non_temporal, 2>(at);
        case 3:
          return blocks<non_temporal, 3>(at);
        case 4:
          return blocks<non_temporal, 4>(at);
        case 5:
          return blocks<non_temporal, 5>(at);
        case 6:
          return blocks<non_temporal, 6>(at);
        case 7:
          return blocks<non_temporal, 7>(at);
        case 8:
          return blocks<non_temporal, 8>(at);
      }
    return blocks<non_temporal, 0>(at);
  }

  template <bool non_temporal, int known_source_count>
  std::size_t blocks(std::size_t at) {
    for (; at + block_bytes <= bytes_; at += block_bytes) block<unroll, non_temporal, known_source_count>(at);
    return at;
  }

  template <std::size_t vectors, bool non_temporal, int known_source_count = 0>
  void block(std::size_t at) {
    Wide result[vectors];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) result[v] = get(0, at + v * sizeof(Packed));
    const auto combine = [&](int source) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (std::size_t v = 0; v < vectors; ++v)
        result[v] = Op::combine(result[v], get(source, at + v * sizeof(Packed)));
    };
    if constexpr (known_source_count > 0) {
#pragma GCC unroll 8
      for (int source = 1; source < known_source_count; ++source) combine(source);
    } else {
#pragma GCC unroll 1
      for (int source = 1; source < source_count_; ++source) combine(source);
    }
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) {
      char* to = destination_ + at + v * sizeof(Packed);
      if constexpr (non_temporal)
        store_non_temporal(to, finish(result[v]));
      else
        store(to, finish(result[v]));
    }
  }

  // Fewer bytes than a vector: padded with zeros.
  void partial(std::size_t at, std::size_t bytes) {
    const auto get_padded = [&](int source) {
      Packed packed{};
      __builtin_memcpy(&packed, sources_[source] + at, bytes);
      return Element::widen(packed);
    };
    Wide result = get_padded(0);
    for (int source = 1; source < source_count_; ++source) result = Op::combine(result, get_padded(source));
    const Packed packed = finish(result);
    __builtin_memcpy(destination_ + at, &packed, bytes);
  }

  Wide get(int source, std::size_t at) const { return Element::widen(load<Packed>(sources_[source] + at)); }

  Packed finish(Wide result) const {
    // Times the inverse of a power of two is the same as divided by it, and faster.
    if constexpr (std::is_same_v<Op, Average>)
      result = total_is_power_of_two_ ? result * (1 / total_) : result / total_;
    return Element::narrow(result);
  }

  const char* const* sources_;
  int source_count_;
  char* destination_;
  std::size_t bytes_;
  bool non_temporal_;
  typename Element::Lane total_;
  bool total_is_power_of_two_;
};

// The destination is aligned: a store that straddles two cache lines costs twice as much as such a load.
template <bool non_temporal>
void copy(void* destination, const void* source, std::size_t bytes) {
  using Bytes = Vector<std::uint8_t>;
  constexpr std::size_t block_bytes = 4 * sizeof(Bytes);
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  if (bytes >= 2 * block_bytes) {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % sizeof(Bytes);
    __builtin_memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= block_bytes; to += block_bytes, from += block_bytes, bytes -= block_bytes)
#pragma GCC unroll 4
      for (std::size_t at = 0; at < block_bytes; at += sizeof(Bytes))
        if constexpr (non_temporal)
          store_non_temporal(to + at, load<Bytes>(from + at));
        else
          store(to + at, load<Bytes>(from + at));
    if constexpr (non_temporal) fence_non_temporal();
  }
  __builtin_memcpy(to, from, bytes);
}

template <typename Element>
constexpr void add_floating(ReduceKernel (&row)[reduce_op_count]) {
  row[static_cast<int>(ReduceOp::sum)] = Kernel<Element, Sum>::run;
  row[static_cast<int>(ReduceOp::avg)] = Kernel<Element, Average>::run;
  row[static_cast<int>(ReduceOp::min)] = Kernel<Element, Min>::run;
  row[static_cast<int>(ReduceOp::max)] = Kernel<Element, Max>::run;
  row[static_cast<int>(ReduceOp::product)] = Kernel<Element, Product>::run;
}

// Unsigned arithmetic wraps and gives the same bits; only the order needs the sign.
template <typename Signed, typename Unsigned>
constexpr void add_integer(ReduceKernel (&row)[reduce_op_count]) {
  row[static_cast<int>(ReduceOp::sum)] = Kernel<Plain<Unsigned>, Sum>::run;
  row[static_cast<int>(ReduceOp::min)] = Kernel<Plain<Signed>, Min>::run;
  row[static_cast<int>(ReduceOp::max)] = Kernel<Plain<Signed>, Max>::run;
  row[static_cast<int>(ReduceOp::product)] = Kernel<Plain<Unsigned>, Product>::run;
  row[static_cast<int>(ReduceOp::band)] = Kernel<Plain<Unsigned>, And>::run;
  row[static_cast<int>(ReduceOp::bor)] = Kernel<Plain<Unsigned>, Or>::run;
  row[static_cast<int>(ReduceOp::bxor)] = Kernel<Plain<Unsigned>, Xor>::run;
}

constexpr void add_boolean(ReduceKernel (&row)[reduce_op_count]) {
  for (ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::bor})
    row[static_cast<int>(op)] = Kernel<Boolean, Or>::run;
  for (ReduceOp op : {ReduceOp::product, ReduceOp::min, ReduceOp::band})
    row[static_cast<int>(op)] = Kernel<Boolean, And>::run;
  row[static_cast<int>(ReduceOp::bxor)] = Kernel<Boolean, Xor>::run;
}

#define HOLMES_STRINGIFY(text) #text
#define HOLMES_NAME(text) HOLMES_STRINGIFY(text)

constexpr KernelSet make_kernels() {
  KernelSet set{HOLMES_NAME(HOLMES_ISA), {}, copy<false>, copy<true>};
  add_floating<Plain<double>>(set.reduce[static_cast<int>(DType::float64)]);
  add_floating<Plain<float>>(set.reduce[static_cast<int>(DType::float32)]);
  add_floating<Float16>(set.reduce[static_cast<int>(DType::float16)]);
  add_floating<Bfloat16>(set.reduce[static_cast<int>(DType::bfloat16)]);
  add_integer<std::int8_t, std::uint8_t>(set.reduce[static_cast<int>(DType::int8)]);
  add_integer<std::int16_t, std::uint16_t>(set.reduce[static_cast<int>(DType::int16)]);
  add_integer<std::int32_t, std::uint32_t>(set.reduce[static_cast<int>(DType::int32)]);
  add_integer<std::int64_t, std::uint64_t>(set.reduce[static_cast<int>(DType::int64)]);
  add_integer<std::uint8_t, std::uint8_t>(set.reduce[static_cast<int>(DType::uint8)]);
  add_boolean(set.reduce[static_cast<int>(DType::boolean)]);
  return set;
}

}  // namespace

extern const KernelSet kernels;
constexpr KernelSet kernels = make_kernels();

}  // namespace holmes::HOLMES_ISA
