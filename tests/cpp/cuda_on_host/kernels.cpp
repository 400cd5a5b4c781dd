// The whole of libholmes_cuda for the host.
#include "kernels/bucket_move.cu"
#include "kernels/launch.cu"
#include "kernels/shard_sum.cu"
#include "kernels/squared_norm.cu"
