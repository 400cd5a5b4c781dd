// How many ranks of one process, every pair connected, the limit of open files allows.
#pragma once

#include <sys/resource.h>

#include <cstdio>

namespace holmes::test {

// `wanted`, or as many as fit where the hard limit is lower (`ulimit -n 1024` sets that one too): a multiple of four.
inline int ranks_that_fit(int wanted) {
  constexpr int files_of_the_rest = 100;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  int ranks = wanted;
  while (ranks > 4 && static_cast<rlim_t>(4 * ranks * ranks + files_of_the_rest) > limit.rlim_max) ranks -= 4;
  if (ranks < wanted)
    std::printf("%d ranks, not %d: the hard limit of open files is %llu\n", ranks, wanted,
                static_cast<unsigned long long>(limit.rlim_max));
  return ranks;
}

}  // namespace holmes::test
