// Two ranks, threads of one process, sum a number: the C++ library in ten lines.
#include <iostream>
#include <thread>

#include "holmes/comm/communicator.hpp"

int main() {
  auto store = holmes::make_local_store();
  float values[] = {1, 2};
  auto run_rank = [&](int rank) {
    auto communicator = holmes::make_communicator(store, {.rank = rank, .size = 2});
    communicator->all_reduce({&values[rank], 1, holmes::DType::float32, nullptr}, holmes::ReduceOp::sum)->wait();
  };
  std::thread peer(run_rank, 1);
  run_rank(0);
  peer.join();
  std::cout << values[0] << " " << values[1] << std::endl;
}
