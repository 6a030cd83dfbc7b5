// SPDX-License-Identifier: Apache-2.0
// Programs built against other versions of the headers: smaller and larger structs.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "c/small_world.h"

namespace fovea::test {
namespace {

// A struct of the caller with `extra` more bytes than the library knows.
template <typename S>
struct Larger {
  S known;
  uint64_t extra[4];
};

template <typename S>
using Init = fovea_status (*)(S*, size_t);

// Init fills the caller's size and nothing behind it.
template <typename S>
void check_init(Init<S> init) {
  std::vector<unsigned char> memory(sizeof(S) + 64, 0xee);
  S* const value = reinterpret_cast<S*>(memory.data());
  for (const size_t size : {size_t{8}, sizeof(S) / 16 * 8, sizeof(S), sizeof(S) + 32}) {
    std::fill(memory.begin(), memory.end(), static_cast<unsigned char>(0xee));
    ASSERT_EQ(init(value, size), FOVEA_OK) << fovea_last_error();
    EXPECT_EQ(value->struct_size, size);
    for (size_t i = sizeof(S); i < size; ++i) EXPECT_EQ(memory[i], 0);
    for (size_t i = size; i < memory.size(); ++i) EXPECT_EQ(memory[i], 0xee);
  }
  EXPECT_EQ(init(value, 0), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(init(value, sizeof(S) + 1), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(init(nullptr, sizeof(S)), FOVEA_INVALID_ARGUMENT);
}

TEST(StructSize, InitWritesTheCallersSizeAlone) {
  check_init<fovea_attention_spec>(fovea_attention_spec_init);
  check_init<fovea_kv_cache_spec>(fovea_kv_cache_spec_init);
  check_init<fovea_state_cache_spec>(fovea_state_cache_spec_init);
  check_init<fovea_batch_limits>(fovea_batch_limits_init);
  check_init<fovea_device_info>(fovea_device_info_init);
  check_init<fovea_selection_request>(fovea_selection_request_init);
  check_init<fovea_lent_pool>(fovea_lent_pool_init);
  check_init<fovea_kv_layer_view>(fovea_kv_layer_view_init);
  check_init<fovea_state_layer_view>(fovea_state_layer_view_init);
  check_init<fovea_prefix>(fovea_prefix_init);
  check_init<fovea_prefix_match>(fovea_prefix_match_init);
  check_init<fovea_prefix_cache_stats>(fovea_prefix_cache_stats_init);
  check_init<fovea_batch>(fovea_batch_init);
  check_init<fovea_layer_tensors>(fovea_layer_tensors_init);
  check_init<fovea_layer_parts>(fovea_layer_parts_init);
  check_init<fovea_engine_options>(fovea_engine_options_init);
  check_init<fovea_sampling_params>(fovea_sampling_params_init);
  check_init<fovea_generate_request>(fovea_generate_request_init);
  check_init<fovea_generation>(fovea_generation_init);
  check_init<fovea_result>(fovea_result_init);
  check_init<fovea_conversation>(fovea_conversation_init);
  check_init<fovea_engine_stats>(fovea_engine_stats_init);
}

// Defaults that are not 0 are those of C++.
TEST(StructSize, FieldsBehindASmallerStructHaveTheirDefaults) {
  SmallWorld world;
  ASSERT_EQ(world.plan(), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(world.forward(), FOVEA_OK) << fovea_last_error();
  const std::vector<float> expected = world.output();

  // An older batch ends before masks, an older spec before dual_chunk. Garbage follows both.
  world.reset();
  world.batch.struct_size = offsetof(fovea_batch, masks);
  std::memset(reinterpret_cast<char*>(&world.batch) + world.batch.struct_size, 0xee,
              sizeof world.batch - world.batch.struct_size);
  ASSERT_EQ(world.plan(), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(world.forward(), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(world.output(), expected);

  // Without save_kv's field the default stores k and v: 0 would read an empty cache.
  world.reset();
  world.layer.struct_size = offsetof(fovea_layer_tensors, save_kv);
  fovea_attention_spec plain = world.spec;
  plain.has_rope = plain.needs_lse = 0;
  plain.struct_size = offsetof(fovea_attention_spec, dual_chunk);
  plain.dual_chunk = {-1, -1};
  plain.scores.has_sinks = 77;
  world.request.spec = &plain;
  fovea_selection* selection = nullptr;
  fovea_backend* backend = nullptr;
  ASSERT_EQ(fovea_selection_create(&world.request, &selection), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(fovea_backend_create(selection, world.pool, nullptr, world.threads, &backend),
            FOVEA_OK);
  ASSERT_EQ(fovea_backend_reserve(backend, &world.limits, nullptr, 0), FOVEA_OK);
  world.layer.lse = nullptr;
  ASSERT_EQ(fovea_backend_plan(backend, &world.batch, nullptr), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(fovea_backend_forward(backend, &world.layer, nullptr), FOVEA_OK) << fovea_last_error();
  const std::vector<float> old_layer = world.output();
  world.reset();
  world.layer.lse = world.layer.sinks = nullptr;
  world.layer.rotary = {};
  ASSERT_EQ(fovea_backend_forward(backend, &world.layer, nullptr), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(world.output(), old_layer);
  EXPECT_EQ(fovea_backend_destroy(backend), FOVEA_OK);
  EXPECT_EQ(fovea_selection_destroy(selection), FOVEA_OK);
}

TEST(StructSize, FieldsOfALaterVersionMustBeZero) {
  SmallWorld world;
  Larger<fovea_batch> batch{world.batch, {}};
  batch.known.struct_size = sizeof batch;
  EXPECT_EQ(fovea_backend_plan(world.backend, &batch.known, nullptr), FOVEA_OK)
      << fovea_last_error();
  batch.extra[1] = 1;
  EXPECT_EQ(fovea_backend_plan(world.backend, &batch.known, nullptr), FOVEA_INVALID_ARGUMENT);
  const std::string at = "byte " + std::to_string(sizeof(fovea_batch) + 8);
  EXPECT_NE(std::string(fovea_last_error()).find("batch has a value at " + at), std::string::npos)
      << fovea_last_error();
}

TEST(StructSize, OutputsFillTheCallersSizeAlone) {
  SmallWorld world;
  Larger<fovea_kv_layer_view> larger;
  std::memset(&larger, 0xee, sizeof larger);
  larger.known.struct_size = sizeof larger;
  ASSERT_EQ(fovea_kv_pool_layer(world.pool, 0, &larger.known), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(larger.known.struct_size, sizeof larger);
  EXPECT_EQ(larger.known.page_size, kWorldPageSize);
  for (const uint64_t word : larger.extra) EXPECT_EQ(word, 0u);

  fovea_kv_layer_view smaller;
  std::memset(&smaller, 0xee, sizeof smaller);
  smaller.struct_size = offsetof(fovea_kv_layer_view, k_page_stride);
  ASSERT_EQ(fovea_kv_pool_layer(world.pool, 0, &smaller), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(smaller.k, larger.known.k);
  EXPECT_EQ(static_cast<uint64_t>(smaller.k_page_stride), 0xeeeeeeeeeeeeeeee);
}

}  // namespace
}  // namespace fovea::test
