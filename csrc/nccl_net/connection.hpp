// Connection: one direction between two processes, as NCCL's proxy uses it; and the listener that makes its receiving
// end.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_net/setup.hpp"

namespace holmes::nccl_net {

// Thread-safe, but for its end.
class Connection {
public:
  // A message under way; lives as long as its connection.
  struct Request {
    Connection* connection = nullptr;
    WorkPtr work;
    std::size_t bytes = 0;  // of a send
    std::shared_ptr<std::size_t> received_bytes;
    bool is_send = false;
  };

  Connection(Pair pair, bool sends) : pair_(std::move(pair)), sends_(sends) {}
  // Afterwards nothing touches memory of messages any more; those under way are given up.
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Both return at once; the memory is in use until `test` is true. A message may be shorter than what receives it.
  Request* send(void* data, std::size_t bytes, int tag);
  Request* receive(void* data, std::size_t bytes, int tag);
  // Whether it is done, and then its bytes; the request is gone afterwards. Throws what failed it.
  static bool test(Request* request, std::size_t& bytes);

  // "sends to rank 1 (host b) over eth0 10.1.0.1:4000 -> 10.1.0.2:4001".
  std::string text() const;

private:
  Request* free_request();
  void give_back(Request& request);
  Buffer message(void* data, std::size_t bytes) const;

  const Pair pair_;
  const bool sends_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Request>> requests_;  // all there ever were at a time
  std::vector<Request*> free_;
};

// What `listen` made. One thread at a time.
class Listener {
public:
  explicit Listener(Network& network) : network_(network), handle_(network.make_handle()) {}
  const Handle& handle() const { return handle_; }
  // The receiving end; null while it is being made. NCCL accepts once for each listener. Throws what failed it.
  std::unique_ptr<Connection> accept();

private:
  Network& network_;
  const Handle handle_;
  std::unique_ptr<Setup> setup_;
  bool has_accepted_ = false;
};

// The sending end that `handle`, NCCL's own copy, leads to; null while it is being made: to be called again with the
// same one. Thread-safe. Throws what failed it.
std::unique_ptr<Connection> connect(Network& network, Handle& handle);

}  // namespace holmes::nccl_net
