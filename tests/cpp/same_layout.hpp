// Declarations of ours against another library's own.
#pragma once

#include <cstddef>
#include <utility>

// A member, also one of a member: the same place and size.
#define SAME_MEMBER(ours, our_member, theirs, their_member)                                                   \
  static_assert(offsetof(ours, our_member) == offsetof(theirs, their_member) &&                               \
                    sizeof(std::declval<ours&>().our_member) == sizeof(std::declval<theirs&>().their_member), \
                #theirs "." #their_member)
