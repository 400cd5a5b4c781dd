#include "nccl_net/connection.hpp"

#include <map>

#include "holmes/core/text.hpp"

namespace holmes::nccl_net {
namespace {

constexpr int peer_of_sender = 0, peer_of_receiver = 1;

// The library's own tag is not NCCL's.
std::uint32_t tag_of(int tag) { return static_cast<std::uint32_t>(tag) & 0x7fffffffU; }

}  // namespace

Connection::~Connection() {
  std::vector<WorkPtr> pending;
  for (const auto& request : requests_)
    if (request->work && !request->work->is_final()) pending.push_back(request->work);
  if (pending.empty()) return;
  pair_.communicator->abort("NCCL closed the connection with " + std::to_string(pending.size()) +
                            " messages under way");
  for (const auto& work : pending) work->await_final();
}

Connection::Request* Connection::free_request() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) {
    requests_.push_back(std::make_unique<Request>());
    requests_.back()->connection = this;
    requests_.back()->received_bytes = std::make_shared<std::size_t>();
    free_.reserve(requests_.size());
    return requests_.back().get();
  }
  Request* request = free_.back();
  free_.pop_back();
  return request;
}

void Connection::give_back(Request& request) {
  request.work.reset();
  std::lock_guard lock(mutex_);
  free_.push_back(&request);
}

Buffer Connection::message(void* data, std::size_t bytes) const {
  if (bytes <= max_message_bytes) return {data, bytes, DType::uint8};
  throw UsageError("a message of " + std::to_string(bytes) + " bytes is more than the " +
                   std::to_string(max_message_bytes) + " that this plugin says it takes");
}

Connection::Request* Connection::send(void* data, std::size_t bytes, int tag) {
  if (!sends_) throw UsageError("NCCL sends on a connection that receives");
  CallOptions call;
  call.async = true;
  Request* request = free_request();
  request->is_send = true;
  request->bytes = bytes;
  try {
    request->work = pair_.communicator->send(message(data, bytes), peer_of_sender, tag_of(tag), call);
  } catch (...) {
    give_back(*request);
    throw;
  }
  return request;
}

Connection::Request* Connection::receive(void* data, std::size_t bytes, int tag) {
  if (sends_) throw UsageError("NCCL receives on a connection that sends");
  CallOptions call;
  call.async = true;
  Request* request = free_request();
  request->is_send = false;
  try {
    request->work = pair_.communicator->recv_up_to(message(data, bytes), peer_of_receiver, tag_of(tag),
                                                   request->received_bytes, call);
  } catch (...) {
    give_back(*request);
    throw;
  }
  return request;
}

bool Connection::test(Request* request, std::size_t& bytes) {
  if (!request->work->is_final()) request->connection->pair_.communicator->poll();
  if (!request->work->is_final()) return false;
  const std::exception_ptr error = request->work->error();
  bytes = request->is_send ? request->bytes : *request->received_bytes;
  request->connection->give_back(*request);
  if (error) std::rethrow_exception(error);
  return true;
}

std::string Connection::text() const {
  std::string paths, host;
  for (const ConnectionInfo& info : pair_.communicator->connections()) {
    if (info.purpose != "p2p") continue;
    host = info.host;
    const std::string path = info.interface + " " + info.local_address + " -> " + info.remote_address;
    add_word(paths, info.transport == "shm" ? "shared memory" : path);
    if (!info.encryption.empty()) paths += " (" + info.encryption + ")";
  }
  const std::string rank = pair_.peer_rank ? "rank " + std::to_string(*pair_.peer_rank) + " (host " + host + ")" : host;
  return (sends_ ? "sends to " : "receives from ") + rank + " over " + paths;
}

std::unique_ptr<Connection> Listener::accept() {
  if (has_accepted_) throw UsageError("this listener has accepted its connection already; NCCL listens once for each");
  if (!setup_)
    setup_ = std::make_unique<Setup>([&network = network_, handle = handle_] { return network.accept(handle); });
  auto pair = setup_->poll();
  if (!pair) return nullptr;
  has_accepted_ = true;
  return std::make_unique<Connection>(std::move(*pair), false);
}

namespace {

// Of connects that NCCL asks for again and again; it keeps nothing but its handle meanwhile.
class PendingConnects {
public:
  static PendingConnects& get() {
    static PendingConnects* const made = new PendingConnects();
    return *made;
  }

  std::optional<Pair> poll(Network& network, Handle& handle) {
    std::lock_guard lock(mutex_);
    if (handle.pending == 0) {
      forget_abandoned();
      pending_.emplace(++last_, Pending{handle, Setup([&network, copy = handle] { return network.connect(copy); })});
      handle.pending = last_;
    }
    const auto found = pending_.find(handle.pending);
    Handle begun = handle;
    begun.pending = 0;
    if (found == pending_.end() || found->second.handle != begun)
      throw UsageError("NCCL asks for a connection that it gave up, or with a handle that was changed meanwhile");
    try {
      auto pair = found->second.setup.poll();
      if (pair) forget(found, handle);
      return pair;
    } catch (...) {
      forget(found, handle);
      throw;
    }
  }

private:
  struct Pending {
    Handle handle;  // as it came
    Setup setup;
  };
  using Pendings = std::map<std::uint64_t, Pending>;

  void forget(Pendings::iterator which, Handle& handle) {
    pending_.erase(which);
    handle.pending = 0;
  }
  // NCCL asks all the time; where it stopped it was aborted.
  void forget_abandoned() {
    constexpr auto patience = std::chrono::minutes(2);
    const auto now = Clock::now();
    std::erase_if(pending_, [&](const auto& entry) { return now - entry.second.setup.asked_at() > patience; });
  }

  std::mutex mutex_;
  Pendings pending_;
  std::uint64_t last_ = 0;
};

}  // namespace

std::unique_ptr<Connection> connect(Network& network, Handle& handle) {
  handle.check();
  auto pair = PendingConnects::get().poll(network, handle);
  if (!pair) return nullptr;
  return std::make_unique<Connection>(std::move(*pair), true);
}

}  // namespace holmes::nccl_net
