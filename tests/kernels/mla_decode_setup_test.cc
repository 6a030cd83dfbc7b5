// SPDX-License-Identifier: Apache-2.0
// What absorbed MLA decode takes and how much workspace it asks for, which needs no GPU.
#include <gtest/gtest.h>

#include <string>

#include "fovea/error.h"
#include "kernels/cuda/mla_decode.h"

namespace fovea::kernels::cuda {
namespace {

TEST(MlaDecodeSetup, RefusesWhatTheKernelsDoNotTake) {
  const MlaDecodeSetup good = {.multiprocessors = 132};
  EXPECT_GT(MlaDecode::workspace_bytes(good, {}), 0u);
  const auto refusal = [&](auto change) {
    MlaDecodeSetup setup = good;
    change(setup);
    try {
      MlaDecode::workspace_bytes(setup, {});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refusal([](MlaDecodeSetup& s) { s.rank = 384; }).find("rank is 384"),
            std::string::npos);
  EXPECT_NE(refusal([](MlaDecodeSetup& s) { s.rope = 32; }).find("rope is 32"), std::string::npos);
  EXPECT_NE(refusal([](MlaDecodeSetup& s) { s.sm = 80; }).find("sm is 80"), std::string::npos);
  EXPECT_NE(refusal([](MlaDecodeSetup& s) { s.dtype = DType::f32; }).find("dtype is"),
            std::string::npos);
  EXPECT_NE(refusal([](MlaDecodeSetup& s) {
              s.cache = MlaCache::fp8_rows;
              s.rank = 256;
            }).find("fp8_rows hold 512, 64"),
            std::string::npos);
  EXPECT_NE(refusal([](MlaDecodeSetup& s) { s.scale_per_token = true; }).find("a scale for each"),
            std::string::npos);
  EXPECT_NE(refusal([](MlaDecodeSetup& s) {
              s.family = &portable_mla();
              s.sm = 75;
            }).find("sm is 75, at least 80"),
            std::string::npos);
  EXPECT_NE(refusal([](MlaDecodeSetup& s) { s.q_heads = 0; }).find("q_heads is 0"),
            std::string::npos);
  EXPECT_NE(refusal([](MlaDecodeSetup& s) { s.page_size = 0; }).find("page_size is 0"),
            std::string::npos);
}

// Items and ranges are bounded by the limits, so the workspace grows with them and never shrinks.
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
