// Frames of a striped stream, on two or three rails. The input is a script: raw bytes, frames with any field, reads.
#include "fuzz.hpp"
#include "holmes/core/error.hpp"
#include "holmes/transport/rails_channel.hpp"

using namespace holmes;
using namespace holmes::fuzz;

namespace {

enum Step : std::uint8_t { raw, frame, take, close_rail, step_count };

std::string step_bytes(Step step, int rail, std::string arguments) {
  return std::string(1, static_cast<char>(step + step_count * rail)) + std::move(arguments);
}

// kind, rail, bytes (3), sequence (1), payload that is written (2)
std::string frame_step(int rail, FrameKind kind, std::uint32_t bytes, std::uint8_t sequence, std::uint16_t written) {
  std::string text;
  for (const std::uint32_t value : {static_cast<std::uint32_t>(kind), 0u, bytes & 255, bytes >> 8 & 255, bytes >> 16,
                                    static_cast<std::uint32_t>(sequence), written & 255u, written >> 8 & 255u})
    text += static_cast<char>(value);
  return step_bytes(frame, rail, text);
}

}  // namespace

std::vector<std::string> fuzz::seeds() {
  const auto read_all = step_bytes(take, 0, std::string("\xff\xff", 2));
  const auto data = [](int rail, std::uint32_t bytes, std::uint8_t sequence, std::uint16_t written) {
    return frame_step(rail, FrameKind::data, bytes, sequence, written);
  };
  return {'\2' + data(0, 100, 0, 100) + data(1, 50, 1, 50) + read_all,
          '\2' + data(1, 50, 1, 50) + read_all + data(0, 100, 0, 100) + read_all,
          '\3' + data(2, 1000, 1, 10) + read_all + data(0, 1000, 0, 1000) + read_all + data(1, 900, 1, 60) + read_all,
          '\2' + data(0, 100, 0, 100) + data(1, 100, 0, 100) + read_all + read_all,
          '\2' + frame_step(0, FrameKind::retire, 0, 0, 0) + data(0, 9, 0, 9) + read_all,
          '\2' + step_bytes(raw, 1, std::string("\x08RH345678", 9)) + read_all + step_bytes(close_rail, 0, "")};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  static const std::string payload(1 << 16, 'x');
  Input input(bytes, size);
  const int rails = 2 + input.byte() % 2;
  std::vector<UniqueFd> peers;
  std::vector<Connection> sockets;
  for (int i = 0; i < rails; ++i) {
    auto [own, peer] = socket_pair();
    Connection socket{.fd = std::move(own), .rail = i};
    socket.info.interface = "lo";
    sockets.push_back(std::move(socket));
    peers.push_back(std::move(peer));
  }
  const auto context = std::make_shared<RailsContext>();
  context->communicator = "fuzz";
  RailsChannel channel(1, std::move(sockets), context);
  std::string into(1 << 16, '\0');
  try {
    for (int steps = 0; !input.empty() && steps < 64; ++steps) {
      const auto step = input.byte();
      const int peer = peers[static_cast<std::size_t>(step / step_count % rails)].get();
      if (step % step_count == raw) {
        feed(peer, input.text(input.byte()));
      } else if (step % step_count == frame) {
        FrameHeader header;
        header.kind = static_cast<FrameKind>(input.byte());
        header.rail = input.byte();
        header.bytes = static_cast<std::uint32_t>(input.number(3));
        header.sequence = input.byte();
        if (header.sequence > 200) header.sequence <<= 8 * (header.sequence % 8);
        header.crc = header.right_crc();
        feed(peer,
             std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload.substr(0, input.number(2)));
      } else if (step % step_count == take) {
        const std::size_t wanted = input.number(2), half = wanted / 3;
        const iovec pieces[] = {{into.data(), half}, {into.data() + half, wanted - half}};
        for (int i = 0; i < 3; ++i) REQUIRE(channel.try_recv(pieces) <= wanted);
        std::vector<pollfd> fds;
        channel.prepare_wait(true, false, fds);
        channel.finish_wait(Clock::now(), fds);
      } else {
        ::shutdown(peer, SHUT_RDWR);
      }
    }
    const iovec piece{into.data(), into.size()};
    for (int i = 0; i < 4; ++i) channel.try_recv({&piece, 1});
  } catch (const StreamClosed&) {
  } catch (const HolmesError&) {
  }
  return 0;
}
