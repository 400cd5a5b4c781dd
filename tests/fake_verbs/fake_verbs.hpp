// What tests tell the stand-in for libibverbs (found with dlsym), beside what its functions are called with.
#pragma once

#include <cstddef>

// "seed": of delays and order. "delay_us": a request takes up to so long, and its acknowledgement as long again.
// "fail_after": of all requests the one that gets no answer, counted from now on; -1: none. "retry_ms": how long the
// sender of it tries. "memory_limit": bytes that may be registered; -1: no limit. "limited_device": only with that HCA.
// "infiniband_device": the HCA that is of InfiniBand; -1: none, all are of RoCE. "port_active": 0 or 1.
// "inline_limit": bytes that a request may hold. "fork_state": what is said of memory and forks; 2: nothing is needed.
// "die_after": of all requests the one with which HCA number "die_device" is lost, counted from now on; -1: none.
// "die_kind": 0: its port is down; else its port is said to be active, but 1: it hears nothing, 2: it is not heard;
// 3: its port goes down and tells so, 4: and is up again within 21 ms.
// "port_down", "port_up": of an HCA, which tells so; while it is down who sends tries again. "device_fatal": an HCA
// says that it has failed, and is as with 1. "pairs_fatal": it says so of each of its queue pairs, which go on.
// "peermem", 1: memory of the fake CUDA driver's GPUs may be registered as any other; "dmabuf", 0: exported memory may
// not. "hostile", 1: of what is lost the acknowledgement may be all that is; what was given up may arrive for a while,
// as packets do; that receives are over is told late. "read_us_per_mib": what a read takes longer, on HCA number
// "slow_device" twice that. "heal": all HCAs are well, and equally fast.
extern "C" void fake_verbs_set(const char* name, long value);
// What was made and is not destroyed.
extern "C" long fake_verbs_objects();
// Requests that were made, calls that made them, and requests that were answered.
extern "C" long fake_verbs_posted();
extern "C" long fake_verbs_posts();
extern "C" long fake_verbs_answered();
// Bytes that were read from a peer's memory.
extern "C" long fake_verbs_read_bytes();
// Of these, by queue pairs of an HCA.
extern "C" long fake_verbs_device_bytes(int device);
// Bytes of memory that the fake CUDA driver (HOLMES_CUDA_LIBRARY) has page-locked: sent or read out of it, and read
// into it.
extern "C" long fake_verbs_pinned_out_bytes();
extern "C" long fake_verbs_pinned_in_bytes();
// And of its GPUs.
extern "C" long fake_verbs_gpu_out_bytes();
extern "C" long fake_verbs_gpu_in_bytes();
// Whether any of these bytes are the HCA's: a request that is not acknowledged reads or writes them, or the peer reads
// them; and whether any are registered.
extern "C" int fake_verbs_uses(const void* begin, std::size_t bytes);
extern "C" int fake_verbs_is_registered(const void* begin, std::size_t bytes);
// How often memory was registered, and how many bytes are.
extern "C" long fake_verbs_registrations();
extern "C" long fake_verbs_registered_bytes();
// Completion events that were raised: how often a thread that sleeps was woken.
extern "C" long fake_verbs_events();
// What HCAs told by themselves that was taken and acknowledged, and taken and not yet.
extern "C" long fake_verbs_told();
extern "C" long fake_verbs_untold();
