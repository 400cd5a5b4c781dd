// TcpStore: a Store over TCP, for jobs that have no torch.distributed Store.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "holmes/bootstrap/store.hpp"
#include "holmes/core/descriptors.hpp"

namespace holmes {

class TcpStoreServer;
namespace store_protocol {
struct Request;
}

// A key-value store that one process serves and all others reach. Where the job's secret is given, every connection
// proves it in both directions; else who reaches the port can read and write, so let it listen where only the job is.
// Frames that make no sense are dropped with their connection. Thread-safe.
class TcpStore final : public AtomicStore {
public:
  // Longest key and largest value, in bytes; longer ones are refused with UsageError.
  static constexpr std::size_t max_key_bytes = 4096;
  static constexpr std::size_t max_value_bytes = std::size_t{16} << 20;

  // `is_server`: serves on `host`:`port` (port 0: the kernel chooses, see port()) until it is destroyed. Else connects,
  // trying until the server is there or `timeout` has passed (UnreachableError). `secret`: the job's; empty:
  // HOLMES_SECRET or HOLMES_SECRET_FILE, else none. ProtocolError where the other side has another one, or none.
  // `reply_timeout`: of every request, beyond what it is to wait; UnreachableError after it. (With 1,000 ranks on its
  // machine a server answers late.)
  TcpStore(std::string host, std::uint16_t port, bool is_server, Duration timeout = std::chrono::seconds(60),
           const std::string& secret = "", Duration reply_timeout = std::chrono::seconds(20));
  ~TcpStore() override;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Duration timeout) override;
  void wait(const std::string& key, Duration timeout) override;
  std::size_t remove(std::span<const std::string> keys) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override;
  bool check(std::span<const std::string> keys) override;
  std::vector<std::string> multi_get(std::span<const std::string> keys, Duration timeout) override;
  std::size_t num_keys() override;
  const std::string& host() const { return host_; }
  std::uint16_t port() const { return port_; }
  bool is_server() const { return server_ != nullptr; }

private:
  std::string call(store_protocol::Request request, Duration timeout = Duration::zero());
  // Of a request whose reply is a number.
  std::uint64_t call_for_number(store_protocol::Request request);
  UniqueFd connect(Duration timeout);
  // Proves the secret, in both directions, or says at least something.
  void introduce(int fd, Clock::time_point deadline) const;
  [[noreturn]] void throw_lost(int error) const;
  [[noreturn]] void throw_no_store() const;
  std::string where() const { return "the store at " + host_ + ":" + std::to_string(port_); }

  std::string host_;
  std::uint16_t port_;
  std::string secret_;
  std::uint64_t epoch_;  // of the process whose server it is (see fork_epoch)
  std::unique_ptr<TcpStoreServer> server_;
  Duration timeout_, reply_timeout_;
  std::mutex mutex_;
  std::vector<UniqueFd> idle_;  // connections no call uses; a call that waits does not hold up the others
  std::uint64_t idle_epoch_;    // of the process whose they are
};

}  // namespace holmes
