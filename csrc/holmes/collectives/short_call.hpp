// ShortCall: a collective of few bytes (most_short_bytes between two ranks) and few ranks, carried out whole in the
// thread that calls it: from the stack into the rings or sockets, and out of them once everything is there.
#pragma once

#include <array>
#include <vector>

#include "holmes/collectives/collective_header.hpp"
#include "holmes/collectives/owed_headers.hpp"

namespace holmes {

// On the wire it is what the collectives of its form are (see short_form), so each rank decides for itself; and what
// takes longer goes on as one of these (Collective::set_gone): nothing is taken out of a channel before all is there.
class ShortCall {
public:
  static constexpr int most_ranks = 8;

  ShortCall(Group& group, const Signature& signature) : group_(group), signature_(signature) {}
  ShortCall(const ShortCall&) = delete;
  ShortCall& operator=(const ShortCall&) = delete;
  // What goes to and comes from `peer`, or is copied where that is this rank. Once for every rank.
  void set(int peer, const void* sent, std::size_t sent_bytes, void* received, std::size_t received_bytes);
  // What comes is reduced, in rank order and with what this rank `sent` to itself, into what it receives from itself.
  void set_reduction(std::size_t count) { reduced_count_ = count; }

  Signature& signature() { return signature_; }
  const Signature& signature() const { return signature_; }
  // Whether it can be sent this way.
  virtual bool has_room() const = 0;
  // Sends what waits for nobody. Returns whether all of that went; what did not, the collective is to send.
  virtual bool send() = 0;
  // Takes what came, where everything is there that this rank waits for; sends what follows it. (What does not fit is
  // barred: the collective tells of it.)
  virtual ShortState take() = 0;
  // After `take`: headers of those that nothing else comes from, where they are still to come. Whether there are any.
  virtual bool append_owed(OwedHeaders& /*owed*/, Clock::time_point /*deadline*/) const { return false; }
  // What went, by rank.
  std::vector<std::size_t> gone_bytes() const;
  // Whether some of it waits in a channel for more to be sent, and more than a header does.
  bool keeps_any() const { return keeps_any_; }
  bool keeps_payload() const { return keeps_payload_; }

protected:
  struct Flow {
    CollectiveHeader out;
    const void* sent;
    void* received;
    std::size_t sent_bytes;
    std::size_t received_bytes;
    std::size_t gone_bytes;
    const std::byte* payload;  // where it came
    bool is_owed;
  };

  ~ShortCall() = default;
  bool has_room_for(int peer, std::size_t bytes) const {
    return group_.channels[peer]->short_room_bytes() >= collective_header_bytes + bytes;
  }
  // Whether the peer has no use yet for what this rank sends it.
  bool is_behind(int peer) const;
  // Sends `peer` its header and so many bytes. Returns whether all of it went.
  bool post(int peer, const void* sent, std::size_t bytes, bool later);
  // Looks for what `peer` sends.
  ShortState look_at(int peer, std::size_t bytes, bool asks);
  void copy_own() const;
  // `sources` by rank.
  void reduce_all(const void* const* sources) const;

  Group& group_;
  Signature signature_;
  std::size_t reduced_count_ = 0;
  std::array<Flow, most_ranks> flows_;  // as many as there are ranks

private:
  bool keeps_any_ = false;
  bool keeps_payload_ = false;
};

}  // namespace holmes
