// TcpStoreServer: the thread that holds a TcpStore's keys. And the frames it understands.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "holmes/core/unique_fd.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

// A request: magic (4 bytes), operation (1), length of the key (4), of the value (4), milliseconds to wait (8), key,
// value. A reply: status (1), length of the value (4), value. Numbers are little endian.
namespace store_protocol {
inline constexpr std::string_view magic = "HST1";
inline constexpr std::size_t request_header_bytes = 21;
inline constexpr std::size_t reply_header_bytes = 5;
inline constexpr char op_set = 's', op_get = 'g', op_wait = 'w';
inline constexpr char status_ok = 'o', status_timeout = 't', status_full = 'f';

void put_number(std::string& bytes, std::uint64_t value, std::size_t size);
std::uint64_t number_at(const std::string& bytes, std::size_t offset, std::size_t size);
}  // namespace store_protocol

class TcpStoreServer {
public:
  // Throws UsageError where the host has no address here, SystemError where the port is taken.
  TcpStoreServer(const std::string& host, std::uint16_t port);
  ~TcpStoreServer();
  std::uint16_t port() const { return port_; }

private:
  struct Client {
    UniqueFd fd;
    std::string input, output;
    std::optional<std::string> awaited;  // key of the request that waits
    bool wants_value = false;
    Clock::time_point deadline = Clock::time_point::max();  // of that request; before the first one: to say something
    bool is_known = false;                                  // has sent a request that makes sense
  };

  void run();
  void poll_once();
  void accept_all();
  bool receive(Client& client);
  bool handle_request(Client& client);
  bool send(Client& client);
  void reply(Client& client, char status, const std::string& value = "");
  void set(Client& client, const std::string& key, std::string value);

  UniqueFd listener_, wake_;
  std::uint16_t port_ = 0;
  std::map<std::string, std::string> values_;  // of the thread, as all below
  std::size_t stored_bytes_ = 0;
  std::vector<Client> clients_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace holmes
