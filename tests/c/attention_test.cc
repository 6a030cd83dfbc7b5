// SPDX-License-Identifier: Apache-2.0
// Selection, compositions, merging and addresses through the C interface give what
// C++ gives.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "c/small_world.h"
#include "c/through_c.h"
#include "fovea/merge_states.h"

namespace fovea::test {
namespace {

using TextCall = fovea_status (*)(const fovea_selection*, char*, size_t*);

std::string text_of(const fovea_selection* selection, TextCall call) {
  size_t bytes = 0;
  EXPECT_EQ(call(selection, nullptr, &bytes), FOVEA_OK);
  std::string text(bytes, '?');
  EXPECT_EQ(call(selection, text.data(), &bytes), FOVEA_OK);
  EXPECT_EQ(text.back(), '\0');
  text.pop_back();
  return text;
}

// Compares every candidate, reason and text.
void expect_same(const fovea_selection* given, const Selection& expected) {
  EXPECT_EQ(text_of(given, fovea_selection_name), expected.chosen->name);
  EXPECT_EQ(text_of(given, fovea_selection_asked), expected.asked);
  EXPECT_EQ(text_of(given, fovea_selection_fallback), expected.fallback);
  EXPECT_EQ(text_of(given, fovea_selection_notes), expected.notes);
  EXPECT_EQ(text_of(given, fovea_selection_explain), expected.explain());
  size_t bytes = 0, count = 0;
  ASSERT_EQ(fovea_selection_workspace_bytes(given, &bytes), FOVEA_OK);
  EXPECT_EQ(bytes, expected.workspace_bytes);
  ASSERT_EQ(fovea_selection_candidates(given, &count), FOVEA_OK);
  ASSERT_EQ(count, expected.candidates.size());
  for (size_t i = 0; i < count; ++i) {
    const Candidate& candidate = expected.candidates[i];
    char text[1024];
    bytes = sizeof text;
    ASSERT_EQ(fovea_candidate_name(given, i, text, &bytes), FOVEA_OK);
    EXPECT_EQ(text, candidate.name);
    size_t reasons = 0;
    ASSERT_EQ(fovea_candidate_reasons(given, i, &reasons), FOVEA_OK);
    ASSERT_EQ(reasons, candidate.reasons.size());
    for (size_t j = 0; j < reasons; ++j) {
      int32_t code = -1;
      ASSERT_EQ(fovea_reason_code(given, i, j, &code), FOVEA_OK);
      EXPECT_EQ(code, static_cast<int32_t>(candidate.reasons[j].code));
      bytes = sizeof text;
      ASSERT_EQ(fovea_reason_text(given, i, j, text, &bytes), FOVEA_OK);
      EXPECT_EQ(text, candidate.reasons[j].text);
      bytes = sizeof text;
      ASSERT_EQ(fovea_reject_code_name(code, text, &bytes), FOVEA_OK);
      EXPECT_EQ(text, reject_code_name(candidate.reasons[j].code));
    }
  }
}

BackendRequest small_request() {
  BackendRequest request;
  request.spec.q_heads = kWorldQHeads;
  request.spec.kv_heads = kWorldKvHeads;
  request.spec.head_dim = request.spec.head_dim_v = kWorldDim;
  request.cache = {.layers = 2,
                   .kv_heads = kWorldKvHeads,
                   .head_dim = kWorldDim,
                   .head_dim_v = kWorldDim,
                   .page_size = kWorldPageSize};
  request.limits = {.max_requests = 2, .max_tokens = 8, .max_q_len = 8, .max_kv_len = 16};
  request.device = cpu_device();
  return request;
}

TEST(AttentionInC, SelectionsHaveEveryReason) {
  const BackendRegistry registry = BackendRegistry::builtin();
  BackendRequest request = small_request();
  request.limits.max_kv_len = 64;
  for (const char* wish : {"auto", "reference", "prefer:flash"}) {
    const fovea_attention_spec spec = to_c(request.spec);
    const fovea_kv_cache_spec cache = to_c(request.cache);
    const fovea_batch_limits limits = to_c(request.limits);
    fovea_selection_request wanted;
    ASSERT_EQ(fovea_selection_request_init(&wanted, sizeof wanted), FOVEA_OK);
    wanted.spec = &spec;
    wanted.cache = &cache;
    wanted.limits = &limits;
    wanted.backend = wish;
    fovea_selection* selection = nullptr;
    ASSERT_EQ(fovea_selection_create(&wanted, &selection), FOVEA_OK) << fovea_last_error();
    expect_same(selection, select_backend(registry, request, parse_backend_wish(wish)));
    EXPECT_EQ(fovea_selection_destroy(selection), FOVEA_OK);
  }
}

TEST(AttentionInC, ARefusedRequestCanKeepItsReasons) {
  SmallWorld world;
  world.request.backend = "flash";
  fovea_selection* selection = nullptr;
  EXPECT_EQ(fovea_selection_create(&world.request, &selection), FOVEA_UNSUPPORTED);
  EXPECT_EQ(selection, nullptr);
  const std::string refusal = fovea_last_error();
  world.request.allow_none = 1;
  ASSERT_EQ(fovea_selection_create(&world.request, &selection), FOVEA_OK);
  EXPECT_EQ(text_of(selection, fovea_selection_name), "");
  EXPECT_EQ(text_of(selection, fovea_selection_explain), refusal);
  size_t reasons = 0;
  int32_t code = -1;
  ASSERT_EQ(fovea_candidate_reasons(selection, 1, &reasons), FOVEA_OK);
  EXPECT_GT(reasons, 0u);
  ASSERT_EQ(fovea_reason_code(selection, 1, 0, &code), FOVEA_OK);
  EXPECT_EQ(code, FOVEA_REJECT_DEVICE);
  fovea_backend* backend = nullptr;
  EXPECT_EQ(fovea_backend_create(selection, world.pool, nullptr, world.threads, &backend),
            FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_selection_destroy(selection), FOVEA_OK);
}

TEST(AttentionInC, CompositionsGiveTheBitsOfTheirParts) {
  SmallWorld world;
  ASSERT_EQ(world.plan(), FOVEA_OK);
  ASSERT_EQ(world.forward(), FOVEA_OK);
  const std::vector<float> expected = world.output();
  fovea_backend* second = nullptr;
  fovea_backend* by_phase = nullptr;
  fovea_backend* by_layer = nullptr;
  ASSERT_EQ(fovea_backend_create(world.selection, world.pool, nullptr, world.threads, &second),
            FOVEA_OK);
  ASSERT_EQ(fovea_compose_by_phase(world.backend, second, FOVEA_PHASE_PREFILL, &by_phase), FOVEA_OK)
      << fovea_last_error();
  fovea_backend* const parts[] = {world.backend, second};
  const int32_t part_of_layer[] = {0, 1, 1}, layer_in_part[] = {0, 0, 1};
  fovea_layer_parts layers;
  ASSERT_EQ(fovea_layer_parts_init(&layers, sizeof layers), FOVEA_OK);
  layers.layers = 3;
  layers.parts = parts;
  layers.part_count = 2;
  layers.part_of_layer = part_of_layer;
  layers.layer_in_part = layer_in_part;
  ASSERT_EQ(fovea_compose_by_layer(&layers, &by_layer), FOVEA_OK) << fovea_last_error();
  for (fovea_backend* const backend : {by_phase, by_layer}) {
    world.reset();
    ASSERT_EQ(fovea_backend_reserve(backend, &world.limits, nullptr, 0), FOVEA_OK);
    ASSERT_EQ(fovea_backend_plan(backend, &world.batch, nullptr), FOVEA_OK) << fovea_last_error();
    ASSERT_EQ(fovea_backend_forward(backend, &world.layer, nullptr), FOVEA_OK);
    EXPECT_EQ(world.output(), expected);
  }
  world.layer.layer = 3;
  EXPECT_EQ(fovea_backend_forward(by_layer, &world.layer, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("layer is 3"), std::string::npos);
  for (fovea_backend* const backend : {second, by_phase, by_layer}) {
    EXPECT_EQ(fovea_backend_destroy(backend), FOVEA_OK);
  }
}

TEST(AttentionInC, MergingGivesTheSameBits) {
  SmallWorld world;
  std::vector<float> out(world.q.bytes / sizeof(float)), lse(world.lse.bytes / sizeof(float), 0.5f);
  std::memcpy(out.data(), world.q.data, world.q.bytes);
  std::vector<float> part_lse(lse.size(), 0.25f);
  std::memcpy(world.out.data, world.q.data, world.q.bytes);
  std::memcpy(world.lse.data, lse.data(), world.lse.bytes);
  fovea_tensor part_out, part_lse_view;
  const int64_t rows[] = {kWorldTokens, kWorldQHeads, kWorldDim};
  ASSERT_EQ(fovea_tensor_init(&part_lse_view, part_lse.data(), FOVEA_F32, world.cpu, rows, 2), 0);
  std::vector<float> part(out.size(), 2.0f);
  ASSERT_EQ(fovea_tensor_init(&part_out, part.data(), FOVEA_F32, world.cpu, rows, 3), 0);
  const fovea_attention_state into = {world.out.view(), world.lse.view()};
  const fovea_attention_state other = {&part_out.view, &part_lse_view.view};
  ASSERT_EQ(fovea_merger_merge(world.merger, &into, &other, kWorldTokens, nullptr), FOVEA_OK)
      << fovea_last_error();
  ThreadPool threads(1);
  const auto merger = make_state_merger({DType::f32, kWorldQHeads, kWorldDim}, {}, &threads);
  const auto state = [](std::vector<float>& values, std::vector<float>& sums) {
    return AttentionState{dense_rows(values.data(), DType::f32, kWorldQHeads, kWorldDim),
                          NaturalLse(sums.data())};
  };
  merger->merge(state(out, lse), state(part, part_lse), kWorldTokens);
  EXPECT_EQ(world.output(), out);
  EXPECT_EQ(std::memcmp(world.lse.data, lse.data(), world.lse.bytes), 0);
}

TEST(AttentionInC, PassAddressesFindArraysThatMoved) {
  SmallWorld world;
  fovea_pass_addresses* now = nullptr;
  ASSERT_EQ(fovea_pass_addresses_create(&now), FOVEA_OK);
  ASSERT_EQ(world.plan(), FOVEA_OK);
  const auto record = [&](fovea_pass_addresses* addresses) {
    check_status(fovea_pass_addresses_add_batch(addresses, world.backend, &world.batch));
    check_status(fovea_pass_addresses_add_layer(addresses, world.backend, &world.layer));
    check_status(fovea_pass_addresses_add_pool(addresses, world.pool));
  };
  record(world.addresses);
  record(now);
  EXPECT_EQ(fovea_pass_addresses_check(world.addresses, now), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(fovea_pass_addresses_destroy(now), FOVEA_OK);
  ASSERT_EQ(fovea_pass_addresses_create(&now), FOVEA_OK);
  world.v.tensor.view.byte_offset = 64;
  record(now);
  EXPECT_EQ(fovea_pass_addresses_check(world.addresses, now), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("new v of layer 0"), std::string::npos)
      << fovea_last_error();
  EXPECT_EQ(fovea_pass_addresses_destroy(now), FOVEA_OK);
}

}  // namespace
}  // namespace fovea::test
