// SPDX-License-Identifier: Apache-2.0
// Rejections of GPU backends and their reasons, on machines without a GPU.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <set>
#include <string>

#include "attention/backends/backends.h"
#include "attention/cuda/backend.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "fovea/kernel_pack.h"
#include "fovea/select_backend.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

// Runs before the process opens its kernels: there is no pack, and compiling is forbidden.
const bool kForbidden = [] {
  setenv("FOVEA_KERNEL_PACK", "", 1);
  setenv("FOVEA_KERNEL_CACHE", "", 1);
  setenv("FOVEA_JIT", "0", 1);
  return true;
}();

BackendRequest served() {
  BackendRequest request;
  request.spec = {.q_heads = 8, .kv_heads = 2, .head_dim = 128, .head_dim_v = 128};
  request.spec.q_dtype = DType::bf16;
  request.cache = {.dtype = DType::bf16,
                   .layers = 1,
                   .kv_heads = 2,
                   .head_dim = 128,
                   .head_dim_v = 128,
                   .page_size = 16};
  request.limits = {.max_requests = 4, .max_tokens = 4, .max_q_len = 1, .max_kv_len = 1024};
  request.device = {.kind = DeviceKind::cuda, .name = "GPU", .sm = 90, .cores = 132};
  return request;
}

class CudaEntry : public ::testing::Test {
 protected:
  const BackendEntry& entry(const char* name = "portable") const { return *registry_.find(name); }
  const BackendRegistry registry_ = BackendRegistry::builtin();
};

TEST_F(CudaEntry, MissingKernelsAreReasonsWhenCompilingIsForbidden) {
  ASSERT_TRUE(kForbidden);
  const std::vector<Reason> reasons = entry().reject(served());
  ASSERT_FALSE(reasons.empty());
  for (const Reason& reason : reasons) {
    EXPECT_EQ(reason.code, RejectCode::kernels);
    EXPECT_NE(reason.text.find("compiling at run time is forbidden"), std::string::npos)
        << reason.text;
  }
  EXPECT_EQ(kernel_sources().why_no_compiler, "forbidden by FOVEA_JIT=0");
}

TEST_F(CudaEntry, EveryLimitIsNamed) {
  struct Case {
    RejectCode code;
    std::string text;
    std::function<void(BackendRequest&)> change;
  };
  const std::vector<Case> cases = {
      {RejectCode::device, "device is the CPU", [](auto& r) { r.device = cpu_device(); }},
      {RejectCode::device, "sm_75", [](auto& r) { r.device.sm = 75; }},
      {RejectCode::q_dtype, "fp32", [](auto& r) { r.spec.q_dtype = DType::f32; }},
      {RejectCode::kv_dtype, "fp16", [](auto& r) { r.cache.dtype = DType::f16; }},
      {RejectCode::head_dim, "320", [](auto& r) { r.spec.head_dim = r.cache.head_dim = 320; }},
      {RejectCode::head_dim, "multiples of 16",
       [](auto& r) { r.spec.head_dim = r.cache.head_dim = 100; }},
      {RejectCode::limits, "65535", [](auto& r) { r.limits.max_requests = 65536; }},
      {RejectCode::window, "mask custom",
       [](auto& r) {
         r.spec.mask = MaskKind::custom;
         r.spec.window = r.cache.window = 64;
       }},
  };
  for (const Case& one : cases) {
    BackendRequest request = served();
    one.change(request);
    bool found = false;
    for (const Reason& reason : entry().reject(request)) {
      found |= reason.code == one.code && reason.text.find(one.text) != std::string::npos;
    }
    EXPECT_TRUE(found) << reject_code_name(one.code) << ": " << one.text;
    EXPECT_THROW(entry().workspace_bytes(request), Error);
  }
}

// Products of fp8 have limits that fp8 queries multiplied as 16-bit values do not.
TEST_F(CudaEntry, FP8ProductsAreLimitedWhereTheyAreComputed) {
  BackendRequest request = served();
  request.spec.q_dtype = request.cache.dtype = DType::f8e4m3;
  BackendRequest scaled = request, wide = request;
  scaled.cache.scale = KvScale::per_token_head;
  wide.spec.head_dim = wide.cache.head_dim = 192;
  const auto reasons = [&](const char* name, const BackendRequest& given) {
    std::string text;
    for (const Reason& reason : entry(name).reject(given)) {
      if (reason.code != RejectCode::kernels) text += reason.text;  // there is no pack
    }
    return text;
  };
  EXPECT_EQ(reasons("flash", request), "");
  EXPECT_NE(reasons("flash", scaled).find("with fp8 queries accepted"), std::string::npos);
  EXPECT_NE(reasons("flash", wide).find("with fp8 queries at most 128"), std::string::npos);
  for (const BackendRequest& given : {request, scaled, wide})
    EXPECT_EQ(reasons("portable", given), "");
}

TEST_F(CudaEntry, NoReasonIsGivenTwice) {
  BackendRequest request = served();
  request.spec.head_dim = request.spec.head_dim_v = 100;
  request.cache.head_dim = request.cache.head_dim_v = 100;
  std::set<std::string> texts;
  for (const Reason& reason : entry().reject(request)) {
    EXPECT_TRUE(texts.insert(reason.text).second) << reason.text;
  }
  EXPECT_FALSE(texts.empty());
}

TEST_F(CudaEntry, WithoutADriverTheReasonIsClear) {
  if (why_no_gpu().empty()) GTEST_SKIP() << "there is a GPU";
  const auto expect_reason = [](const std::function<void()>& call) {
    test::expect_error(ErrorCode::unsupported, why_no_gpu(), call);
  };
  const BackendRequest request = served();
  expect_reason([] { find_device("cuda"); });
  expect_reason([&] { make_kv_pool(request.cache, 4, {DeviceKind::cuda, 0}); });
  BackendContext context;
  context.spec = request.spec;
  context.device = {DeviceKind::cuda, 0};
  expect_reason([&] { entry().create(context); });
}

TEST(FindDevice, NamesOneProcessor) {
  EXPECT_EQ(find_device("cpu").kind, DeviceKind::cpu);
  for (const char* name : {"", "gpu", "cuda:", "cuda:x", "cuda:1x", "cuda:-1"}) {
    EXPECT_THROW(find_device(name), Error) << name;
  }
  EXPECT_EQ(device_name({DeviceKind::cuda, 3}), "cuda:3");
}

// As on the CPU (prefix_levels_test), groups take no more memory if batches may be longer.
TEST(CudaPrefixes, WorkspaceIsBoundedByRequests) {
  const kernels::cuda::AttentionSetup setup = {
      .spec = served().spec, .cache = served().cache, .sm = 90, .multiprocessors = 132};
  for (const CudaKernels* kernels : {&flash_kernels(), &portable_kernels()}) {
    const auto bytes_of_levels = [&](int32_t max_tokens) {
      BatchLimits limits = {.max_requests = 4, .max_q_len = 8, .max_kv_len = 4096};
      limits.max_tokens = max_tokens;
      const size_t without = cuda_workspace_bytes(*kernels, setup, limits);
      limits.prefix_levels = 2;
      return cuda_workspace_bytes(*kernels, setup, limits) - without;
    };
    EXPECT_GT(bytes_of_levels(32), bytes_of_levels(31)) << kernels->name;
    EXPECT_EQ(bytes_of_levels(33), bytes_of_levels(32)) << kernels->name;
    EXPECT_EQ(bytes_of_levels(1 << 20), bytes_of_levels(32)) << kernels->name;
  }
}

}  // namespace
}  // namespace fovea
