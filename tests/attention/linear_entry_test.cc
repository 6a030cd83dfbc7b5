// SPDX-License-Identifier: Apache-2.0
// Requests that the backend `linear_cuda` accepts and rejects, on machines without a GPU.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fovea/select_backend.h"
#include "kernels/cuda/common/gdn_params.h"
#include "kernels/cuda/common/kda_params.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using Change = std::function<void(BackendRequest&)>;

BackendRequest delta_net() {
  BackendRequest request;
  request.spec.kind = AttentionKind::gated_delta_net;
  request.spec.linear = {
      .key_heads = 2, .value_heads = 4, .key_dim = 128, .value_dim = 128, .conv_width = 4};
  request.limits = {.max_requests = 8, .max_tokens = 64, .max_q_len = 8, .max_kv_len = 4096};
  request.device = {.kind = DeviceKind::cuda, .name = "GPU", .sm = 90, .cores = 132};
  return request;
}

// Returns the reasons except missing machine code, which depends on a pack.
std::string reasons(const Change& change) {
  BackendRequest request = delta_net();
  change(request);
  const BackendRegistry registry = BackendRegistry::builtin();
  std::string text;
  for (const Reason& reason : registry.find("linear_cuda")->reject(request)) {
    if (reason.code == RejectCode::kernels) continue;
    text += std::string(reject_code_name(reason.code)) + ": " + reason.text + "\n";
  }
  return text;
}

TEST(LinearEntry, ServesEveryLinearKindFromAmpereOn) {
  const Change changes[] = {
      [](auto&) {},
      [](auto& r) { r.device.sm = 80; },
      [](auto& r) { r.device.sm = 120; },
      [](auto& r) { r.spec.kind = AttentionKind::mamba2; },
      [](auto& r) { r.spec.kind = AttentionKind::kda; },
      [](auto& r) { r.spec.kind = AttentionKind::lightning; },
      [](auto& r) {
        r.spec.kind = AttentionKind::mamba1;
        r.spec.linear = {
            .key_heads = 1, .value_heads = 8192, .key_dim = 16, .value_dim = 1, .conv_width = 4};
      },
      [](auto& r) {
        r.spec.kind = AttentionKind::short_conv;
        r.spec.linear = {.value_heads = 2048, .value_dim = 1, .conv_width = 3};
      },
      [](auto& r) { r.spec.linear.key_dim = 256; },
      [](auto& r) { r.spec.linear.key_dim = 24; },
      [](auto& r) { r.spec.linear.value_dim = 1024; },
      [](auto& r) { r.spec.linear.value_dim = 5; },
      [](auto& r) { r.spec.linear.conv_width = 8; },
      [](auto& r) { r.spec.linear.conv_width = 0; },
      [](auto& r) { r.spec.batch_invariant = true; },
      [](auto& r) { r.spec.q_dtype = DType::bf16; },
  };
  for (const Change& change : changes) EXPECT_EQ(reasons(change), "");
}

TEST(LinearEntry, RefusesEveryLimitByName) {
  const std::pair<const char*, Change> wrong[] = {
      {"device: device is sm_75, accepted: sm_80 or newer\n", [](auto& r) { r.device.sm = 75; }},
      {"device: device is the CPU, accepted: NVIDIA GPUs of sm_80 or newer\n",
       [](auto& r) { r.device = cpu_device(); }},
      {"head_dim: linear.key_dim is 260, accepted: multiples of 4 up to 256\n",
       [](auto& r) { r.spec.linear.key_dim = 260; }},
      {"head_dim: linear.key_dim is 30, accepted: multiples of 4 up to 256\n",
       [](auto& r) { r.spec.linear.key_dim = 30; }},
      {"head_dim: linear.value_heads * linear.value_dim is 10, accepted: multiples of 4\n",
       [](auto& r) {
         r.spec.linear.value_heads = 2;
         r.spec.linear.value_dim = 5;
       }},
      {"head_dim: linear.conv_width is 9, at most 8\n",
       [](auto& r) { r.spec.linear.conv_width = 9; }},
      {"limits: max_requests is 65536, at most 65535\n",
       [](auto& r) { r.limits.max_requests = 65536; }},
      {"q_dtype: q_dtype is fp16, linear kinds accept: fp32, bf16\n",
       [](auto& r) { r.spec.q_dtype = DType::f16; }},
  };
  for (const auto& [reason, change] : wrong) {
    EXPECT_NE(reasons(change).find(reason), std::string::npos) << reasons(change);
  }
}

TEST(LinearEntry, WorkspaceHoldsSpansAndConvolvedTokens) {
  const BackendRegistry registry = BackendRegistry::builtin();
  BackendRequest request = delta_net();
  const auto bytes = [&] { return registry.find("linear_cuda")->workspace_bytes(request); };
  if (!registry.find("linear_cuda")->reject(request).empty()) {
    GTEST_SKIP() << "there is neither a pack nor a compiler";
  }
  const size_t plan = 8 * (16 + 16) + 2 * 64 * sizeof(int32_t);  // StateSpan, DraftSpan
  EXPECT_EQ(bytes(), plan + 64 * size_t{2 * 2 * 128 + 4 * 128} * sizeof(float));
  const size_t token_by_token = bytes();
  request.spec.linear.conv_width = 0;
  EXPECT_EQ(bytes(), plan);

  // A prompt of 64 tokens in chunks: the terms of two chunks, because one may be cut.
  request = delta_net();
  request.spec.q_dtype = DType::bf16;
  EXPECT_GE(bytes(), token_by_token + 2 * 4 * sizeof(kernels::cuda::GdnTerms));
  EXPECT_LE(bytes(), token_by_token + 2 * 4 * sizeof(kernels::cuda::GdnTerms) + 128);
  request.spec.kind = AttentionKind::kda;
  EXPECT_GE(bytes(), token_by_token + 2 * 4 * sizeof(kernels::cuda::KdaTerms));
  EXPECT_LE(bytes(), token_by_token + 2 * 4 * sizeof(kernels::cuda::KdaTerms) + 128);
  request.spec.batch_invariant = true;
  EXPECT_EQ(bytes(), token_by_token);

  // A convolution alone writes straight to `out`.
  request.spec.kind = AttentionKind::mamba1;
  request.spec.linear.value_dim = 1;
  EXPECT_EQ(bytes(), plan);
}

}  // namespace
}  // namespace fovea
