// SPDX-License-Identifier: Apache-2.0
// The runner of passes on a GPU by itself. Skipped without a GPU.
#include "engine/model_runner.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/cuda_batch.h"
#include "engine/reference_text.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "gpu/gpu.h"
#include "model/cuda_device.h"

namespace fovea {
namespace {

constexpr BatchLimits kLimits = {
    .max_requests = 4, .max_tokens = 32, .max_q_len = 32, .max_kv_len = 64};

// What Engine::load puts together, with the parts at hand.
struct Parts {
  Parts() {
    registry = BackendRegistry::builtin();
    options.registry = &registry;
    options.kv_dtype = DType::bf16;
    model = load_model(model_folder("llama"), make_cuda_device({.max_rows = kLimits.max_tokens}));
    caches = std::make_unique<CacheSet>(cache_options());
    const std::vector<GroupSelection> selections = select_group_backends(
        model->info(), cache_options().groups, options, kLimits, find_device("cuda"));
    runner = make_model_runner(*model, *caches, threads, selections, {kLimits, kLimits.max_requests});
  }

  CacheSetOptions cache_options() const {
    CacheSetOptions wanted;
    wanted.groups = cache_groups(model->info(), options);
    wanted.max_requests = kLimits.max_requests;
    wanted.device = {DeviceKind::cuda, 0};
    wanted.plan.pages = 20;
    wanted.plan.window_pages.resize(wanted.groups.size());
    wanted.plan.max_context = kLimits.max_kv_len;
    return wanted;
  }

  // One token of a new request.
  std::vector<float> decode(int32_t token) {
    CacheLease lease = caches->admit({{&token, 1}, {}}, false, 0).value();
    EXPECT_TRUE(caches->extend(lease, 0, 1));
    std::vector<float> logits(static_cast<size_t>(model->info().vocabulary));
    const PassPart part{{&token, 1}, 0, &lease, 1};
    int32_t drawn = 0;
    runner->run({&part, 1}, logits, {&drawn, 1});
    EXPECT_EQ(drawn, -1);
    caches->release(lease);
    return logits;
  }

  BackendRegistry registry;
  EngineOptions options;
  ThreadPool threads{1};
  std::unique_ptr<Model> model;
  std::unique_ptr<CacheSet> caches;
  std::unique_ptr<ModelRunner> runner;
};

class GpuModelRunner : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  }
};

// What is captured or warmed up runs before any batch was filled.
TEST_F(GpuModelRunner, TheFirstBatchIsEmptyAndDrawsNothing) {
  constexpr int32_t kVocabulary = 100;
  const gpu::Context context(0);
  const gpu::DeviceBuffer logits(kLimits.max_requests * kVocabulary * sizeof(float));
  gpu::fill_bytes(logits.data(), 0, logits.bytes(), nullptr);  // greedy draws would be token 0
  const CudaBatch batch(kLimits, RequestTable(kLimits.max_requests + 1, kLimits.max_kv_len),
                        context.info().sm);
  const PassSize size{.requests = kLimits.max_requests,
                      .tokens = kLimits.max_requests,
                      .logit_rows = kLimits.max_requests,
                      .draws = true};
  batch.draw(size, logits.data<float>(), kVocabulary, nullptr);
  std::vector<int64_t> slots(kLimits.max_requests);
  gpu::copy_to_host(slots.data(), batch.view(size).out_slots, slots.size() * sizeof(int64_t),
                    nullptr);
  gpu::synchronize(nullptr);
  for (size_t i = 0; i < slots.size(); ++i) {
    EXPECT_EQ(batch.drawn(i), -1) << i;
    EXPECT_EQ(slots[i], -1) << i;
  }
}

#ifndef NDEBUG
// Other pools in the place of those a graph was captured with.
TEST_F(GpuModelRunner, RefusesToReplayOverPoolsThatMoved) {
  Parts parts;
  const std::vector<float> logits = parts.decode(5);
  EXPECT_EQ(parts.decode(5), logits);
  CacheSet others(parts.cache_options());
  std::swap(*parts.caches, others);
  try {
    parts.decode(5);
    ADD_FAILURE() << "replayed";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(std::string(error.what()).rfind("k of layer 0 of layer group 0 is at", 0), 0u)
        << error.what();
  }
  std::swap(*parts.caches, others);
  EXPECT_EQ(parts.decode(5), logits);
}
#endif

}  // namespace
}  // namespace fovea
