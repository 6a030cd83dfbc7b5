// SPDX-License-Identifier: Apache-2.0
// Requests that the backends `mla` and `portable_mla` accept and reject, on machines without a GPU.
// Limits of other MLA kernels (heads padded to 128, one query per request, page sizes that are
// powers of two, numbers of pages and of splits) do not exist here or are reasons.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "attention/backends/backends.h"
#include "attention/cuda/mla_backend.h"
#include "fovea/error.h"
#include "fovea/select_backend.h"
#include "support/deepseek_spec.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using Change = std::function<void(BackendRequest&)>;

BackendRequest deepseek() {
  BackendRequest request;
  request.spec = test::deepseek_spec();
  request.cache = test::deepseek_cache();
  request.spec.q_dtype = request.cache.dtype = DType::bf16;
  request.limits = {.max_requests = 8, .max_tokens = 64, .max_q_len = 8, .max_kv_len = 4096};
  request.device = {.kind = DeviceKind::cuda, .name = "GPU", .sm = 90, .cores = 132};
  return request;
}

void set_latent(BackendRequest& request, int32_t rank, int32_t rope) {
  request.spec.mla.kv_lora_rank = request.cache.head_dim_v = rank;
  request.spec.mla.rope_dim = rope;
  request.cache.head_dim = rank + rope;
}

void set_token_scales(BackendRequest& request) {
  request.cache.dtype = DType::f8e4m3;
  request.cache.scale = KvScale::per_token_head;
}

void set_f16_over_codes(BackendRequest& request) {
  request.spec.q_dtype = DType::f16;
  request.cache.dtype = DType::f8e4m3;
}

class MlaEntry : public ::testing::TestWithParam<const char*> {
 protected:
  const BackendEntry& entry() const { return *registry_.find(GetParam()); }
  bool portable() const { return entry().name == "portable_mla"; }

  // Returns the reasons except missing machine code, which depends on a pack.
  std::vector<Reason> reasons(const Change& change) const {
    BackendRequest request = deepseek();
    change(request);
    std::vector<Reason> found = entry().reject(request);
    std::erase_if(found, [](const Reason& reason) { return reason.code == RejectCode::kernels; });
    return found;
  }

  const BackendRegistry registry_ = BackendRegistry::builtin();
};

TEST_P(MlaEntry, RefusesEveryLimitByName) {
  struct Case {
    RejectCode code;
    std::string text;
    Change change;
  };
  std::vector<Case> cases = {
      {RejectCode::device, "device is the CPU", [](auto& r) { r.device = cpu_device(); }},
      {RejectCode::device, "device is sm_75", [](auto& r) { r.device.sm = 75; }},
      {RejectCode::head_dim, "kv_lora_rank is 384, accepted: 512, 256",
       [](auto& r) { set_latent(r, 384, 64); }},
      {RejectCode::head_dim, "rope_dim is 32, accepted: 64, 0",
       [](auto& r) { set_latent(r, 512, 32); }},
      {RejectCode::head_dim, "head_dim is 704, at most 576",
       [](auto& r) { set_latent(r, 640, 64); }},
      {RejectCode::head_dim, "nope_dim is 100, accepted: multiples of 8",
       [](auto& r) { r.spec.mla.nope_dim = 100; }},
      {RejectCode::head_dim, "v_dim is 4, accepted: multiples of 8",
       [](auto& r) { r.spec.mla.v_dim = 4; }},
      {RejectCode::heads, "129 q heads share a kv head, at most 128",
       [](auto& r) { r.spec.q_heads = 129; }},
      {RejectCode::q_dtype, "q_dtype is fp32, accepted: fp16, bf16",
       [](auto& r) { r.spec.q_dtype = DType::f32; }},
      {RejectCode::kv_dtype, "cache dtype is fp16, accepted: q_dtype (bf16)",
       [](auto& r) { r.cache.dtype = DType::f16; }},
      {RejectCode::kv_dtype, "cache dtype is fp8_e5m2",
       [](auto& r) { r.cache.dtype = DType::f8e5m2; }},
      {RejectCode::mask, "mask is custom", [](auto& r) { r.spec.mask = MaskKind::custom; }},
      {RejectCode::window, "cache window is 128, accepted: 0",
       [](auto& r) { r.spec.window = r.cache.window = 128; }},
      {RejectCode::chunk, "chunk is 128, accepted: 0", [](auto& r) { r.spec.chunk = 128; }},
      {RejectCode::logit_cap, "logit_cap is 30, accepted: 0",
       [](auto& r) { r.spec.scores.logit_cap = 30; }},
      {RejectCode::alibi, "has_alibi", [](auto& r) { r.spec.scores.has_alibi = true; }},
      {RejectCode::sinks, "has_sinks", [](auto& r) { r.spec.scores.has_sinks = true; }},
      {RejectCode::limits, "max_requests is 65536, at most 65535",
       [](auto& r) { r.limits.max_requests = 65536; }},
  };
  if (!portable()) {
    cases.push_back({RejectCode::device, "device is sm_80, accepted: sm_90",
                     [](auto& r) { r.device.sm = 80; }});
    cases.push_back({RejectCode::device, "device is sm_100, accepted: sm_90",
                     [](auto& r) { r.device.sm = 100; }});
    cases.push_back({RejectCode::kv_scale, "cache scale is per_token_head", set_token_scales});
    cases.push_back(
        {RejectCode::window, "window is 128, accepted: 0", [](auto& r) { r.spec.window = 128; }});
  }
  for (const Case& one : cases) {
    const std::vector<Reason> found = reasons(one.change);
    const bool named = std::ranges::any_of(found, [&](const Reason& reason) {
      return reason.code == one.code && reason.text.find(one.text) != std::string::npos;
    });
    EXPECT_TRUE(named) << reject_code_name(one.code) << ": " << one.text << ", got "
                       << (found.empty() ? "nothing" : found.front().text);
    BackendRequest request = deepseek();
    one.change(request);
    EXPECT_THROW(entry().workspace_bytes(request), Error) << one.text;
  }
}

TEST_P(MlaEntry, TakesWhatOtherKernelsRefuse) {
  std::vector<std::pair<std::string, Change>> cases = {
      {"as it is", [](auto&) {}},
      {"one head", [](auto& r) { r.spec.q_heads = 1; }},
      {"heads that divide nothing", [](auto& r) { r.spec.q_heads = 37; }},
      {"pages of one token", [](auto& r) { r.cache.page_size = 1; }},
      {"pages of no power of two", [](auto& r) { r.cache.page_size = 48; }},
      {"pages of 1000", [](auto& r) { r.cache.page_size = 1000; }},
      {"a million keys", [](auto& r) { r.limits.max_kv_len = 1'000'000; }},
      {"long extends", [](auto& r) { r.limits.max_tokens = r.limits.max_q_len = 16384; }},
      {"drafts in trees", [](auto& r) { r.spec.mask = MaskKind::tree; }},
      {"log-sum-exps", [](auto& r) { r.spec.needs_lse = true; }},
      {"batch-invariant rows", [](auto& r) { r.spec.batch_invariant = true; }},
      {"rank 256", [](auto& r) { set_latent(r, 256, 64); }},
      {"no rotary key", [](auto& r) { set_latent(r, 512, 0); }},
      {"absorbed queries",
       [](auto& r) {
         r.spec.mla.nope_dim = r.spec.mla.v_dim = 0;
         r.spec.scores.softmax_scale = 0.1f;
       }},
      {"e4m3 with one scale",
       [](auto& r) {
         r.cache.dtype = DType::f8e4m3;
         r.cache.scale = KvScale::per_tensor;
       }},
      {"rows of 656 bytes",
       [](auto& r) {
         r.cache.layout = KvLayout::mla_fp8_rows;
         r.cache.dtype = DType::f8e4m3;
       }},
      {"fp16", [](auto& r) { r.spec.q_dtype = r.cache.dtype = DType::f16; }},
      {"e4m3 under fp16 queries", set_f16_over_codes},
      {"rows of 656 bytes under fp16 queries",
       [](auto& r) {
         set_f16_over_codes(r);
         r.cache.layout = KvLayout::mla_fp8_rows;
       }},
      {"rotary positions", [](auto& r) { r.spec.has_rope = true; }},
  };
  if (portable()) {
    cases.emplace_back("sm_80", [](auto& r) { r.device.sm = 80; });
    cases.emplace_back("sm_120", [](auto& r) { r.device.sm = 120; });
    cases.emplace_back("a scale for each token", set_token_scales);
    cases.emplace_back("a window", [](auto& r) { r.spec.window = 128; });
    cases.emplace_back("a window over drafts in trees", [](auto& r) {
      r.spec.window = 128;
      r.spec.mask = MaskKind::tree;
    });
  }
  for (const auto& [what, change] : cases) {
    const std::vector<Reason> found = reasons(change);
    EXPECT_TRUE(found.empty()) << what << ": " << found.front().text;
  }
}

TEST_P(MlaEntry, IsChosenByItsAliasesAndServesGraphs) {
  const std::vector<const char*> aliases =
      portable() ? std::vector{"triton_mla"}
                 : std::vector{"flashmla", "cutlass_mla", "flashinfer_mla", "trtllm_mla"};
  for (const char* name : aliases) EXPECT_EQ(registry_.find(name), &entry()) << name;
  EXPECT_EQ(entry().graphs, GraphSupport::always);
}

// The count is exact, because the function that carves the memory makes it.
TEST_P(MlaEntry, KeepsToItsBudget) {
  const MlaKernels& kernels = portable() ? portable_mla_kernels() : mla_kernels();
  BackendRequest request = deepseek();
  request.limits = {
      .max_requests = 256, .max_tokens = 8192, .max_q_len = 8192, .max_kv_len = 131072};
  const auto bytes = [&](int64_t budget) {
    request.limits.workspace_budget = budget;
    return static_cast<int64_t>(
        mla_workspace_bytes(kernels, request.spec, request.cache, request.device, request.limits));
  };
  const int64_t all = bytes(int64_t{1} << 40), least = bytes(0);
  EXPECT_GT(all, int64_t{2'900'000'000});
  EXPECT_LT(least, int64_t{400'000'000});
  int64_t before = least;
  for (const int64_t budget :
       {int64_t{1} << 28, int64_t{1} << 29, int64_t{1} << 30, int64_t{3} << 29, int64_t{1} << 31}) {
    SCOPED_TRACE(budget);
    const int64_t taken = bytes(budget);
    EXPECT_LE(taken, std::max(budget, least + budget / 4));
    EXPECT_GE(taken, before);
    before = taken;
  }
  EXPECT_LE(bytes(BatchLimits{}.workspace_budget), int64_t{3} << 29);
  EXPECT_EQ(bytes(all + 1024), all);  // except for gaps between buffers
  // LSEs of a part of the heads are not contiguous.
  request.spec.needs_lse = true;
  EXPECT_GT(bytes(0), int64_t{2'100'000'000});
}

TEST_P(MlaEntry, SaysHowPassesAreCut) {
  BackendRequest request = deepseek();
  if (!entry().reject(request).empty()) GTEST_SKIP() << "there are no kernels";
  EXPECT_EQ(entry().notes(request).find("heads at a time"), std::string::npos);
  request.limits = {
      .max_requests = 256, .max_tokens = 8192, .max_q_len = 8192, .max_kv_len = 131072};
  EXPECT_NE(
      entry().notes(request).find("passes of more than 4096 tokens are computed 64 heads at a "
                                  "time, to keep to 1610612736 bytes"),
      std::string::npos)
      << entry().notes(request);
}

TEST(MlaSpec, RotationNeedsARotaryKey) {
  BackendRequest request = deepseek();
  set_latent(request, 512, 0);
  request.spec.has_rope = true;
  const BackendRegistry registry = BackendRegistry::builtin();
  test::expect_invalid("rope_dim is 0, has_rope needs", [&] { select_backend(registry, request); });
}

INSTANTIATE_TEST_SUITE_P(Both, MlaEntry, ::testing::Values("mla", "portable_mla"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fovea
