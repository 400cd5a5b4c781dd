// held_by_work: what Python lends to a Work, given back from any thread.
#pragma once

#include <memory>

namespace holmes {

// Owns `object` until the last copy goes; `release` then runs under the interpreter lock: at once where the thread
// holds it, else soon, in a thread that does. An engine's thread never waits for the lock, which Python may hold for
// milliseconds, and which nobody gets any more while the interpreter ends (what is left then stays).
std::shared_ptr<void> held_by_work(void* object, void (*release)(void*));

// Releases what other threads have let go of. Needs the interpreter lock.
void release_let_go();

}  // namespace holmes
