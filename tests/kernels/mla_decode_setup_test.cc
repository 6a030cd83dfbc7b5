// SPDX-License-Identifier: Apache-2.0
// The requirements of absorbed MLA decode, and its workspace size. Needs no GPU.
#include <gtest/gtest.h>

#include <string>

#include "kernels/cuda/mla_decode.h"
#include "support/expect_error.h"

namespace fovea::kernels::cuda {
namespace {

TEST(MlaDecodeSetup, RefusesWhatTheKernelsDoNotTake) {
  const MlaDecodeSetup good = {.multiprocessors = 132};
  EXPECT_GT(MlaDecode::workspace_bytes(good, {}), 0u);
  const auto refuses = [&](const char* words, auto change) {
    MlaDecodeSetup setup = good;
    change(setup);
    test::expect_invalid(words, [&] { MlaDecode::workspace_bytes(setup, {}); });
  };
  refuses("rank is 384", [](MlaDecodeSetup& s) { s.rank = 384; });
  refuses("rope is 32", [](MlaDecodeSetup& s) { s.rope = 32; });
  refuses("sm is 80", [](MlaDecodeSetup& s) { s.sm = 80; });
  refuses("dtype is", [](MlaDecodeSetup& s) { s.dtype = DType::f32; });
  refuses("fp8_rows hold 512, 64", [](MlaDecodeSetup& s) {
    s.cache = MlaCache::fp8_rows;
    s.rank = 256;
  });
  refuses("a scale for each", [](MlaDecodeSetup& s) { s.scale_per_token = true; });
  refuses("sm is 75, at least 80", [](MlaDecodeSetup& s) {
    s.family = &portable_mla();
    s.sm = 75;
  });
  refuses("q_heads is 0", [](MlaDecodeSetup& s) { s.q_heads = 0; });
  refuses("page_size is 0", [](MlaDecodeSetup& s) { s.page_size = 0; });
}

// The limits bound items and ranges, so the workspace grows with the limits and never shrinks.
TEST(MlaDecodeSetup, WorkspaceGrowsWithTheLimits) {
  size_t before = 0;
  for (const int32_t requests : {1, 7, 64, 512}) {
    const size_t bytes = MlaDecode::workspace_bytes(
        {.multiprocessors = 132}, {.max_requests = requests, .max_tokens = requests});
    EXPECT_GE(bytes, before);
    before = bytes;
  }
}

}  // namespace
}  // namespace fovea::kernels::cuda
