// Pace: how far a rank may send ahead, where its peers are reached in different ways.
#include "holmes/collectives/pace.hpp"

#include <memory>

#include "check.hpp"

using namespace holmes;
using holmes::test::result;

namespace {

class FakeChannel final : public Channel {
public:
  FakeChannel(int peer, std::size_t lead_bytes, bool keeps_pace)
      : Channel(peer), lead_bytes_(lead_bytes), keeps_pace_(keeps_pace) {}
  std::size_t try_send(std::span<const iovec> /*pieces*/) override { return 0; }
  std::size_t try_recv(std::span<const iovec> /*pieces*/) override { return 0; }
  std::size_t lead_bytes() override { return lead_bytes_; }
  bool keeps_pace() const override { return keeps_pace_; }
  bool prepare_wait(bool /*for_recv*/, bool /*for_send*/, std::vector<pollfd>& /*fds*/) override { return true; }
  void shutdown() override {}
  void append_info(std::vector<ConnectionInfo>& /*infos*/) const override {}

private:
  std::size_t lead_bytes_;
  bool keeps_pace_;
};

constexpr std::size_t kib = 1024;

struct Reached {
  std::size_t lead_bytes;
  bool keeps_pace;
};

std::size_t sendable_bytes(std::initializer_list<Reached> peers, Pace::Least least, std::size_t sent_bytes) {
  Group group;
  group.channels.emplace_back();
  for (const auto& [lead_bytes, keeps_pace] : peers)
    group.channels.push_back(
        std::make_unique<FakeChannel>(static_cast<int>(group.channels.size()), lead_bytes, keeps_pace));
  group.size = static_cast<int>(group.channels.size());
  Pace pace;
  pace.update(least, group);
  return pace.sendable_bytes(sent_bytes, 1024 * kib);
}

void check_limits() {
  CHECK(sendable_bytes({{256 * kib, true}}, {0, {}}, 0) == 256 * kib);
  CHECK(sendable_bytes({{256 * kib, true}, {512 * kib, true}}, {100 * kib, {}}, 200 * kib) == 412 * kib);
  CHECK(sendable_bytes({{256 * kib, true}}, {0, 0.25}, 128 * kib) == 384 * kib);
  CHECK(sendable_bytes({{256 * kib, true}}, {0, {}}, 300 * kib) == 0);
  CHECK(sendable_bytes({{256 * kib, true}}, {}, 300 * kib) == SIZE_MAX);  // everybody has all
}

// One that reads this rank's memory lets nobody else get ahead.
void check_other_memory() {
  CHECK(sendable_bytes({{1024 * kib, false}, {256 * kib, true}}, {0, {}}, 0) == 256 * kib);
  CHECK(sendable_bytes({{1024 * kib, false}, {1024 * kib, false}}, {0, {}}, 300 * kib) == SIZE_MAX);
}

}  // namespace

int main() {
  check_limits();
  check_other_memory();
  return result("test_pace");
}
