// AttemptStore: what one try of a set-up says in the Store, apart from what earlier ones under the same name said.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "holmes/bootstrap/store.hpp"

namespace holmes {

// A view of `base` for one try of setting up the communicator `name` on one rank. Rank 0 begins each try under a token
// of its own, the others join the last one that it has begun. No rank of this process joins one twice: who tries again
// before rank 0 does waits for it, up to `patience` (HOLMES_CONNECT_TIMEOUT goes first), and throws TimeoutError. So
// who had not come to a try that failed hears of the failure or, where rank 0 tries again by then, is part of that. The
// first call is one thread's.
class AttemptStore final : public Store {
public:
  AttemptStore(std::shared_ptr<Store> base, std::string name, int rank, Duration patience);

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Duration timeout) override;
  void wait(const std::string& key, Duration timeout) override;
  std::size_t remove(std::span<const std::string> keys) override;
  std::shared_ptr<Store> another_client() override;

private:
  Store& view(Clock::time_point until);
  std::string begin();
  std::string join(Clock::time_point until);

  std::shared_ptr<Store> base_;
  std::string name_;
  std::string key_;
  int rank_;
  Duration patience_;
  Clock::time_point deadline_;
  std::mutex mutex_;  // protects the next one
  std::unique_ptr<Store> view_;
};

}  // namespace holmes
