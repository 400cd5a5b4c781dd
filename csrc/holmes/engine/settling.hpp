// Settling: communicators of this process that were destroyed and are not closed yet, since other ranks have still to
// enter operations with a root that ended here (local_completion). The process waits for them at its end.
#pragma once

namespace holmes {

// Of one communicator each. Thread-safe.
void begin_settling();
void end_settling();

// Until none is left, which takes up to the operations' deadlines. The end of the process calls it; who ends one by
// _exit, as multiprocessing ends what it forked, calls it before. Returns at once in a forked child that made none.
void wait_until_settled();

}  // namespace holmes
