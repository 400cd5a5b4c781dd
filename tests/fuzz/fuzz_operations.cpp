// Headers and payload of collectives and of messages, as a peer's stream brings them. First byte: which operation;
// second: how much of the right header is changed.
#include <sys/uio.h>

#include "fuzz.hpp"
#include "holmes/collectives/choose.hpp"
#include "holmes/core/error.hpp"
#include "holmes/p2p/p2p.hpp"
#include "holmes/transport/tcp_channel.hpp"

using namespace holmes;
using namespace holmes::fuzz;

namespace {

constexpr std::size_t header_bytes = 64;
constexpr std::size_t count = 1000;  // int32 elements of the operation

// A communicator of two ranks, of which this is rank 0; the other one is the fuzzer.
struct Pair {
  Group group;
  UniqueFd peer, control_peer;
  std::unique_ptr<Channel> channel;

  Pair() {
    auto [own, other] = socket_pair();
    auto [own_control, other_control] = socket_pair();
    peer = std::move(other), control_peer = std::move(other_control);
    channel = std::make_unique<TcpChannel>(1, Connection{.fd = std::move(own)});
    group.size = 2;
    group.name = "fuzz";
    group.all_shared_memory = false;
    std::vector<Connection> line;
    line.push_back({.fd = std::move(own_control)});
    group.controls.resize(2);
    group.controls[1] = std::make_unique<ControlConnection>(1, "b1", "lo", std::move(line));
    group.channels.resize(2);
  }
};

// The header that this rank sends is the one that it expects, where both do the same; some of its bytes are changed.
std::string changed(std::string header, Input& input) {
  for (int changes = input.byte() % 8; changes > 0 && !header.empty(); --changes) {
    const std::size_t at = input.byte() % header.size();
    header[at] = static_cast<char>(header[at] ^ input.byte());
  }
  return header;
}

void collective(Input& input, int kind) {
  Pair pair;
  pair.group.channels[1] = std::move(pair.channel);
  std::vector<std::int32_t> data(count, 7), other(count);
  const Buffer own{data.data(), count, DType::int32, nullptr}, theirs{other.data(), count, DType::int32, nullptr};
  const auto work = std::make_shared<Work>();
  const auto deadline = Clock::now() + std::chrono::hours(1);
  std::unique_ptr<Collective> operation;
  if (kind == 0) {
    operation =
        choose_all_reduce(pair.group, {OpCode::all_reduce, DType::int32, ReduceOp::sum, {}}, work, deadline, own);
  } else if (kind == 1) {
    operation =
        choose_all_gather(pair.group, {OpCode::all_gather, DType::int32, {}, {}}, work, deadline, {own, theirs}, own);
  } else {
    operation = choose_reduce_scatter(pair.group, {OpCode::reduce_scatter, DType::int32, ReduceOp::max, {}}, work,
                                      deadline, own, {own, theirs});
  }
  operation->start();
  operation->advance();
  feed(pair.peer.get(), changed(drain(pair.peer.get()).substr(0, header_bytes), input));
  for (int rounds = 0; !operation->is_done() && rounds < 100; ++rounds) {
    feed(pair.peer.get(), input.text(1 + input.byte() * 16));
    operation->advance();
    operation->awaited_recv_bytes(1);
    if (input.empty()) feed(pair.peer.get(), std::string(1 << 12, '\1'));
    drain(pair.peer.get());
  }
}

void messages(Input& input) {
  Pair pair;
  std::vector<std::unique_ptr<Channel>> channels(2);
  channels[1] = std::move(pair.channel);
  P2pEngine p2p(pair.group, std::move(channels), -1);  // nothing wakes it: no GPU
  const auto deadline = Clock::now() + std::chrono::hours(1);
  std::vector<std::vector<std::int32_t>> buffers(4, std::vector<std::int32_t>(count));
  const auto post = [&](bool is_send, int index, std::uint32_t tag, std::optional<int> peer) {
    p2p.submit({.is_send = is_send,
                .buffer = {buffers[static_cast<std::size_t>(index)].data(), count, DType::int32, nullptr},
                .peer = peer,
                .tag = tag,
                .work = std::make_shared<Work>(),
                .deadline = deadline});
  };
  post(true, 0, 1, 1);
  p2p.advance();
  const auto header = drain(pair.peer.get()).substr(0, header_bytes);
  post(false, 1, 1, 1);
  for (int rounds = 0; !input.empty() && rounds < 20; ++rounds) {
    feed(pair.peer.get(), changed(header, input));
    feed(pair.peer.get(), input.text(input.byte()));
    if (input.byte() % 2 == 0) feed(pair.peer.get(), std::string(count * sizeof(std::int32_t), '\2'));
    p2p.advance();
    if (rounds < 2) post(false, 2 + rounds, input.byte() % 3, rounds == 0 ? std::optional<int>{} : 1);
  }
  p2p.describe_overdue(deadline);
}

}  // namespace

std::vector<std::string> fuzz::seeds() {
  std::vector<std::string> all;
  for (const char mode : {'\0', '\1', '\2', '\3'}) {
    all.push_back(std::string(1, mode) + std::string(40, '\0'));
    all.push_back(std::string(1, mode) + "\1\7\1" + std::string(100, '\xff'));
    all.push_back(std::string(1, mode) + "\2\x18\1\x20\1" + std::string(300, '\x20'));
  }
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Input input(bytes, size);
  const int mode = input.byte() % 4;
  try {
    if (mode < 3) {
      collective(input, mode);
    } else {
      messages(input);
    }
  } catch (const StreamClosed&) {
  } catch (const HolmesError&) {
  }
  return 0;
}
