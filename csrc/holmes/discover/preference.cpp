#include "holmes/discover/preference.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <tuple>

namespace holmes {
namespace {

constexpr double alike = 0.75;  // rates this near to each other, as a share of the higher one, are equal

double rate_of(const SharedNetwork& network) { return network.rate_gbps.value_or(0); }

bool are_apart(const SharedNetwork& one, const SharedNetwork& other) {
  return std::ranges::none_of(one.wires,
                              [&](std::int64_t wire) { return std::ranges::binary_search(other.wires, wire); });
}

// The networks that serve a group together with number `first`; `by_rate`: all, the fastest first.
std::vector<std::size_t> rails_with(const std::vector<SharedNetwork>& networks, std::size_t first,
                                    const std::vector<std::size_t>& by_rate) {
  const SharedNetwork& head = networks[first];
  std::vector<std::size_t> rails{first};
  for (const std::size_t index : by_rate) {
    if (head.max_rails && rails.size() >= static_cast<std::size_t>(*head.max_rails)) break;
    const SharedNetwork& one = networks[index];
    const bool fits = index != first && one.hosts == head.hosts && one.is_rdma == head.is_rdma &&
                      one.is_routed == head.is_routed && one.nic_class == head.nic_class &&
                      (head.max_rails || are_alike(one, head));
    if (fits && std::ranges::all_of(rails, [&](std::size_t rail) { return are_apart(networks[rail], one); }))
      rails.push_back(index);
  }
  return rails;
}

}  // namespace

bool are_alike(const SharedNetwork& one, const SharedNetwork& other) {
  if (one.nic_class != other.nic_class || one.is_routed != other.is_routed) return false;
  if (!one.rate_gbps || !other.rate_gbps) return one.rate_gbps == other.rate_gbps;
  return std::min(*one.rate_gbps, *other.rate_gbps) >= alike * std::max(*one.rate_gbps, *other.rate_gbps);
}

std::vector<std::vector<std::size_t>> best_first(const std::vector<SharedNetwork>& given) {
  std::vector<SharedNetwork> networks = given;
  for (SharedNetwork& network : networks) std::ranges::sort(network.wires);
  std::vector<std::size_t> order(networks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {},
                           [&](std::size_t i) { return std::tuple(-rate_of(networks[i]), !networks[i].is_plain); });
  std::vector<std::vector<std::size_t>> rails(networks.size());
  std::vector<double> totals(networks.size());
  for (std::size_t i = 0; i < networks.size(); ++i) {
    rails[i] = rails_with(networks, i, order);
    for (const std::size_t rail : rails[i]) totals[i] += rate_of(networks[rail]);
  }
  std::ranges::sort(order, {}, [&](std::size_t i) { return std::tuple(networks[i].is_routed, -totals[i], i); });
  for (auto begin = order.begin(); begin != order.end();) {
    const auto end = std::find_if(begin, order.end(), [&](std::size_t i) {
      return networks[i].is_routed != networks[*begin].is_routed || totals[i] < alike * totals[*begin];
    });
    std::sort(begin, end, [&](std::size_t a, std::size_t b) {
      const auto key = [&](std::size_t i) {
        const SharedNetwork& one = networks[i];
        return std::tuple(!one.is_rdma, one.nic_class, !one.is_plain, -totals[i], -rate_of(one),
                          -static_cast<double>(one.size), i);
      };
      return key(a) < key(b);
    });
    begin = end;
  }
  std::vector<std::vector<std::size_t>> result;
  for (const std::size_t i : order) result.push_back(std::move(rails[i]));
  return result;
}

}  // namespace holmes
