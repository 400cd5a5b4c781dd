// ReorderBuffer: order, duplicates, room.
#include "check.hpp"
#include "holmes/transport/rail_frame.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

std::unique_ptr<Frame> frame(std::uint64_t sequence) {
  auto result = std::make_unique<Frame>();
  result->header.sequence = sequence;
  return result;
}

bool insert(ReorderBuffer& buffer, std::uint64_t sequence) {
  auto chunk = frame(sequence);
  const bool taken = buffer.insert(chunk);
  CHECK(taken == (chunk == nullptr));
  return taken;
}

void chunks_come_out_in_order() {
  ReorderBuffer buffer;
  CHECK(buffer.due() == nullptr);
  CHECK(insert(buffer, 2) && insert(buffer, 1));
  CHECK(buffer.due() == nullptr && buffer.is_known(1) && !buffer.is_known(0));
  CHECK(buffer.advance() == nullptr);  // 0 went past the buffer
  for (std::uint64_t sequence : {1, 2}) {
    CHECK(buffer.due() != nullptr && buffer.due()->header.sequence == sequence);
    CHECK(buffer.advance()->header.sequence == sequence);
  }
  CHECK(buffer.next() == 3 && buffer.due() == nullptr);
}

void what_comes_twice_is_refused() {
  ReorderBuffer buffer;
  CHECK(insert(buffer, 1) && !insert(buffer, 1));
  buffer.advance();
  buffer.advance();
  CHECK(!insert(buffer, 0) && !insert(buffer, 1));
}

void room_moves_with_the_stream() {
  ReorderBuffer buffer;
  CHECK(buffer.has_room_for(window_chunks - 1) && !buffer.has_room_for(window_chunks));
  CHECK(insert(buffer, window_chunks - 1));
  buffer.advance();
  CHECK(buffer.has_room_for(window_chunks) && insert(buffer, window_chunks));
  CHECK(buffer.due() == nullptr);
}

}  // namespace

int main() {
  chunks_come_out_in_order();
  what_comes_twice_is_refused();
  room_moves_with_the_stream();
  return result("reorder_buffer");
}
