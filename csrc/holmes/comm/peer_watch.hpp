// PeerWatch: one thread of the process that lets communicators look after what nobody drives just now.
#pragma once

#include <memory>

namespace holmes {

class Watched {
public:
  virtual ~Watched() = default;
  // A few times a second. Does not block for long.
  virtual void look() = 0;
};

// Until it is destroyed. Thread-safe; the thread is started when first needed, also in a forked child, and sleeps while
// there is nothing to watch.
void watch(const std::weak_ptr<Watched>& watched);

}  // namespace holmes
