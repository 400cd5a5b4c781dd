// NCCL's binary interface: configuration sizes by version, types and reductions.
#include "check.hpp"
#include "holmes/nccl/abi.hpp"

using namespace holmes;
using namespace holmes::nccl;

namespace {

void test_config() {
  // From the public headers of these versions.
  const std::pair<int, std::size_t> sizes[] = {{21803, 48},  {22105, 48},  {22602, 48}, {22707, 72},
                                               {22809, 80},  {22907, 88},  {23003, 96}, {23007, 96},
                                               {23102, 112}, {23203, 120}, {29900, 120}};
  for (const auto& [version, bytes] : sizes) {
    const Config config = make_config(version);
    CHECK(config.size == bytes && config.magic == 0xcafebeef);
    CHECK(config.version == static_cast<unsigned>(version > newest_known_version ? newest_known_version : version));
    CHECK(config.blocking == INT_MIN && config.net_name == nullptr && config.traffic_class == INT_MIN);
  }
  CHECK(version_text(21803) == "2.18.3" && version_text(23007) == "2.30.7");
}

void test_reductions() {
  CHECK(reduction_of(ReduceOp::sum, DType::float32) == 0 && reduction_of(ReduceOp::avg, DType::bfloat16) == 4);
  CHECK(reduction_of(ReduceOp::min, DType::int8) == 3 && reduction_of(ReduceOp::product, DType::uint8) == 1);
  CHECK(reduction_of(ReduceOp::sum, DType::boolean) == 2 && reduction_of(ReduceOp::band, DType::boolean) == 3);
  CHECK(!data_type_of(DType::int16) && data_type_of(DType::boolean) == 1 && data_type_of(DType::bfloat16) == 9);
  const auto refusal = [](ReduceOp op, DType dtype) {
    return test::message_of<UsageError>([&] { reduction_of(op, dtype); });
  };
  CHECK(test::contains(refusal(ReduceOp::sum, DType::int16), "int16"));
  CHECK(test::contains(refusal(ReduceOp::bxor, DType::boolean), "lowest bit"));
  CHECK(test::contains(refusal(ReduceOp::band, DType::int32), "'band' of int32"));
  CHECK(test::contains(refusal(ReduceOp::avg, DType::int32), "avg"));
}

}  // namespace

int main() {
  test_config();
  test_reductions();
  return test::result("test_nccl_abi");
}
