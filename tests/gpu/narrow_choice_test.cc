// SPDX-License-Identifier: Apache-2.0
// The products that sm90/narrow_gemm takes, which needs a GPU, and how it divides them.
#include <gtest/gtest.h>

#include <cstdint>

#include "gpu/architectures.h"
#include "kernels/cuda/sm90/narrow_gemm/launch.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

// The fastest divisions measured, see docs/kernels/narrow_gemm.md.
TEST(NarrowDivision, IsTheFastestMeasured) {
  struct Case {
    int32_t rows, n, up_offset, k, groups, splits;
  };
  for (const Case& c : {Case{16, 6144, 0, 4096, 2, 2}, Case{128, 6144, 0, 4096, 2, 2},
                        Case{16, 4096, 0, 4096, 2, 3}, Case{128, 4096, 0, 4096, 2, 3},
                        Case{64, 12288, 12288, 4096, 3, 1}, Case{128, 12288, 12288, 4096, 3, 1},
                        Case{64, 4096, 0, 12288, 1, 2}, Case{128, 4096, 0, 12288, 1, 2},
                        Case{64, 6144, 6144, 4096, 3, 2}, Case{128, 6144, 6144, 4096, 3, 2}}) {
    SkinnyGemmParams params{};
    params.rows = c.rows;
    params.n = c.n;
    params.up_offset = c.up_offset;
    params.k = c.k;
    const NarrowProducts::Division division = NarrowProducts::division_of(params);
    EXPECT_EQ(division.groups, c.groups) << c.rows << " rows, " << c.n << " x " << c.k;
    EXPECT_EQ(division.splits, c.splits) << c.rows << " rows, " << c.n << " x " << c.k;
  }
}

class NarrowChoice : public test::GpuKernelTest<::testing::Test> {};

TEST_F(NarrowChoice, LeavesSmallWeightsOfManyRows) {
  if (context->info().sm != gpu::kHopper) GTEST_SKIP() << "the GPU is not sm_90";
  const NarrowProducts products(context->info().sm, *store);
  SkinnyGemmParams params{};
  params.x = params.weight = params.out = reinterpret_cast<void*>(uintptr_t{256});
  params.x_stride = params.weight_stride = params.k = 2048;
  struct Case {
    int32_t rows, n, up_offset;
    bool serves;
  };
  for (const Case& c : {Case{64, 2048, 0, true}, Case{65, 2048, 0, false}, Case{65, 8192, 0, true},
                        Case{65, 8176, 0, false}, Case{128, 4096, 4096, true},
                        Case{128, 4088, 4088, false}, Case{129, 8192, 0, false}}) {
    params.rows = c.rows;
    params.out_stride = params.n = c.n;
    params.up_offset = c.up_offset;
    EXPECT_EQ(products.serves(params), c.serves) << c.rows << " rows, n " << c.n;
    EXPECT_EQ(products.computes(params), c.rows <= NarrowProducts::kMaxRows);
  }
  // Threads store four outputs at once.
  params.rows = 64;
  params.out_stride = 8190;
  EXPECT_FALSE(products.computes(params));
  params.out_stride = 8192;
  params.out = reinterpret_cast<void*>(uintptr_t{260});
  EXPECT_FALSE(products.computes(params));
}

}  // namespace
}  // namespace fovea::kernels::cuda
