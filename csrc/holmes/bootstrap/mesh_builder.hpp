// MeshBuilder: one rank's sockets while a mesh is set up. Listens, connects, accepts, in one poll loop.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "holmes/bootstrap/handshake.hpp"
#include "holmes/bootstrap/mesh.hpp"
#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/core/env.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {

// One thread. Closes whatever it opened when it goes, on success all but the mesh.
class MeshBuilder {
public:
  // `nics` are checked; the ones of the own cluster come last. Throws NicError, SystemError.
  MeshBuilder(const CommunicatorOptions& options, const Env& env, std::vector<NicBinding> nics,
              std::size_t shared_memory_bytes);

  // Opens the listening sockets and writes them into `record`.
  void listen(RankInfo& record);
  // Connects to every lower rank and accepts every higher one; `records` holds all ranks', checked by check_rank_infos.
  // `look_around` is called about once a second, and soon after a connection failed; it may throw to end the set-up.
  Mesh connect(const std::vector<RankInfo>& records, const std::string& secret, Clock::time_point deadline,
               const std::function<void()>& look_around);

private:
  // Of one connection, from connect or accept until the peer has answered and proved the secret.
  static constexpr Duration handshake_timeout = std::chrono::seconds(5);
  // After a connection failed.
  static constexpr Duration look_around_soon = std::chrono::milliseconds(100);

  // A connection to a lower rank, tried until it stands.
  struct Attempt {
    int peer = 0;
    Purpose purpose = Purpose::control;
    int rail = 0;
    int stream = 0;
    int streams = 0;  // of this purpose over this rail; 0: not chosen yet
    bool over_unix = false;
    BoundSocket socket{};
    Clock::time_point started_at{};  // the try under way
    bool is_connected = false;
    std::optional<Handshake> handshake{};
    std::unique_ptr<TlsStream> tls{};  // once the handshake is done, where the connection is encrypted
    Clock::time_point deadline{};      // of the try under way
    Clock::time_point retry_at{};
    Duration retry_delay{};
    int refusals = 0;  // of the proof
    std::optional<Clock::time_point> first_failure{};
    std::string last_failure{};
    int last_errno = 0;
    bool is_done = false;
  };
  // A listening socket.
  struct Listener {
    BoundSocket socket{};
    int rail = 0;
    bool is_unix = false;
  };
  // An accepted connection that has not proved the secret yet.
  struct Stranger {
    UniqueFd fd{};
    const Listener* listener = nullptr;
    Handshake handshake;
    std::unique_ptr<TlsStream> tls{};  // as of Attempt
    Clock::time_point deadline{};
    std::string address{};
    bool is_done = false;
  };

  Connection& slot(int peer, Purpose purpose, int rail, int stream);
  void prepare_slots();
  // How many connections there are to be, now that the system has connected the first one: both sides go by what the
  // connecting one says.
  int choose_streams(const Attempt& attempt) const;
  // Expects so many; counts once for each purpose and rail.
  void expect_streams(int peer, Purpose purpose, int rail, int streams);
  bool has_all_streams(int peer, int rail) const;
  // Behind the first of each rail, in the same order on both sides.
  void append_streams();
  void poll_once(Clock::time_point deadline);

  void start(Attempt& attempt);
  void greet(Attempt& attempt);
  void advance(Attempt& attempt);
  void retry(Attempt& attempt, const std::string& failure, int system_errno = 0);
  [[noreturn]] void give_up(const Attempt& attempt) const;

  void accept_all(const Listener& listener);
  std::string check_hello(const Hello& hello, const Listener& listener) const;
  void advance(Stranger& stranger);
  void drop(Stranger& stranger, const std::string& reason);
  // Names a connection that does not stand, `waited` after the set-up began.
  [[noreturn]] void throw_incomplete(Duration waited) const;

  // Whether connections to `peer` are encrypted.
  bool encrypts(int peer) const;
  // The peer has proved the secret, but TLS with it fails.
  [[noreturn]] void throw_no_tls(int peer, int rail, const std::string& failure) const;
  void fill(int peer, Purpose purpose, int rail, int stream, Connection connected, bool over_unix, bool device_bound);
  int label(int rank) const { return label_of(options_, rank); }
  std::string describe(int rank) const;
  bool shares_memory(int peer) const;
  // The numbers, in `nics_`, of those that join this rank and `peer`.
  RailRange rails_to(int peer) const;
  // Of the connections to `peer`; empty: the system's.
  std::string congestion_control(int peer) const;
  std::string place_of(int rank, int seen_from) const;
  void suit_listener(int fd) const;
  bool is_same_machine(int peer) const;

  const CommunicatorOptions& options_;
  const Env& env_;
  std::vector<NicBinding> nics_;
  std::size_t shared_memory_bytes_;
  std::vector<Listener> listeners_;

  const std::vector<RankInfo>* records_ = nullptr;
  std::string secret_;
  Mesh mesh_;
  int missing_ = 0;  // sockets that do not stand yet
  std::vector<Attempt> attempts_;
  std::vector<Attempt> more_attempts_;  // of streams that were just chosen
  // The streams after the first, where their number is known.
  std::map<std::tuple<int, Purpose, int>, std::vector<Connection>> more_streams_;
  std::vector<Stranger> strangers_;
  Clock::time_point look_around_at_;
};

// 127.0.0.0/8 or ::1.
bool is_loopback(const std::string& address);
// An address that routing protocols announce may sit on lo; its packets come in by another device.
bool can_bind_device(const NicBinding& nic);

}  // namespace holmes
