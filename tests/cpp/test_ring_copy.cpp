// RingCopy: right bytes whatever the stores; StoreChoice: which stores.
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "holmes/transport/shm/copy_tuning.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr double near_s = 0.4e-6;  // a sample's ordinary stores, cores near each other
constexpr double far_s = 2.4e-6;   // the same, cores far from each other
constexpr double bypassing_s = 0.15e-6;

void copies_every_byte() {
  std::mt19937 random(1);
  std::vector<std::byte> source(100000);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  RingCopy copy;
  for (int i = 0; i < 1000; ++i) {
    const std::size_t bytes = random() % 60000;
    const std::size_t from = random() % (source.size() - bytes);
    const std::size_t to = random() % 200;
    std::vector<std::byte> ring(to + bytes + 64, std::byte{0x55});
    copy(ring.data() + to, source.data() + from, bytes);
    CHECK(std::memcmp(ring.data() + to, source.data() + from, bytes) == 0);
    for (std::size_t at = 0; at < to; ++at) CHECK(ring[at] == std::byte{0x55});
    for (std::size_t at = to + bytes; at < ring.size(); ++at) CHECK(ring[at] == std::byte{0x55});
  }
}

void times_few_copies_and_only_large_ones() {
  StoreChoice choice;
  int samples = 0;
  for (int i = 0; i < 640; ++i) {
    CHECK(!choice.wants_sample(2 * StoreChoice::sample_bytes - 1));
    samples += choice.wants_sample(2 * StoreChoice::sample_bytes);
  }
  CHECK(samples == 10);
}

void add_samples(StoreChoice& choice, int count, double cached_s) {
  for (int i = 0; i < count; ++i) choice.add_sample(cached_s, bypassing_s);
}

void goes_around_the_caches_where_ordinary_stores_are_slow() {
  StoreChoice choice;
  CHECK(!choice.bypasses());
  add_samples(choice, 100, near_s);
  CHECK(!choice.bypasses());
  add_samples(choice, 4, far_s);
  CHECK(choice.bypasses());
  add_samples(choice, 10, near_s);
  CHECK(!choice.bypasses());
}

// A reader that is on the writer's own core every other time.
void goes_around_the_caches_where_every_other_sample_is_slow() {
  StoreChoice choice;
  for (int i = 0; i < 10; ++i) {
    add_samples(choice, 1, near_s);
    add_samples(choice, 1, far_s);
  }
  CHECK(choice.bypasses());
}

void an_interrupt_changes_nothing() {
  StoreChoice choice;
  add_samples(choice, 4, near_s);
  choice.add_sample(1, bypassing_s);
  CHECK(!choice.bypasses());
  add_samples(choice, 10, far_s);
  choice.add_sample(bypassing_s, 1);
  CHECK(choice.bypasses());
}

// A source that is not in any cache slows both ways alike.
void a_slow_source_changes_nothing() {
  constexpr double source_s = 5e-6;
  StoreChoice choice;
  for (int i = 0; i < 10; ++i) choice.add_sample(source_s + near_s, source_s + bypassing_s);
  CHECK(!choice.bypasses());
}

}  // namespace

int main() {
  copies_every_byte();
  times_few_copies_and_only_large_ones();
  goes_around_the_caches_where_ordinary_stores_are_slow();
  goes_around_the_caches_where_every_other_sample_is_slow();
  an_interrupt_changes_nothing();
  a_slow_source_changes_nothing();
  return result("ring_copy");
}
