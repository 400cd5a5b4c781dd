// TcpStoreServer: the thread that holds a TcpStore's keys.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "holmes/bootstrap/store_protocol.hpp"
#include "holmes/core/unique_fd.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

class TcpStoreServer {
public:
  // Throws UsageError where the host has no address here, SystemError where the port is taken. `secret`: what clients
  // must prove to know; empty: whoever comes is served.
  TcpStoreServer(const std::string& host, std::uint16_t port, std::string secret = "");
  ~TcpStoreServer();
  std::uint16_t port() const { return port_; }

private:
  struct Client {
    UniqueFd fd;
    std::string input, output;
    std::optional<std::string> awaited;  // key of the request that waits
    bool wants_value = false;
    Clock::time_point deadline = Clock::time_point::max();  // of that request; else to finish one, or to take the reply
    bool is_known = false;  // has sent a request that makes sense and, where there is a secret, proved it
    std::string expected_proof;
  };

  void run();
  void poll_once();
  void accept_all();
  bool receive(Client& client);
  bool handle(Client& client, store_protocol::Request request);
  bool authenticate(Client& client, const store_protocol::Request& request);
  void drop_oldest_stranger();
  void drop_largest();
  void log_drop(const Client& client, const std::string& reason);
  bool send(Client& client);
  void reply(Client& client, char status, const std::string& value = "");
  void set(Client& client, const std::string& key, std::string value);

  const std::string secret_;
  const std::size_t max_clients_;
  UniqueFd listener_, wake_;
  std::uint16_t port_ = 0;
  std::map<std::string, std::string> values_;  // of the thread, as all below
  std::size_t stored_bytes_ = 0;
  std::vector<Client> clients_;
  std::size_t buffered_bytes_ = 0;  // of unfinished requests
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace holmes
