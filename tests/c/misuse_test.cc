// SPDX-License-Identifier: Apache-2.0
// Wrong arguments of every kind give the documented status and a message that names the argument,
// its value and the limit. The handles stay usable.
#include "c/misuse.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace fovea::test {
namespace {

template <typename H, typename Other>
H* as(Other* handle) {
  return reinterpret_cast<H*>(handle);
}

// Changes the batch or the layer.
Misuse changed(const std::string& name, const std::function<void(SmallWorld&)>& change,
               const std::string& message) {
  return {name,
          [=](SmallWorld& world) {
            change(world);
            const fovea_status status = world.plan();
            return status == FOVEA_OK ? world.forward() : status;
          },
          message};
}

std::vector<Misuse> handles() {
  return {
      {"null_handle", [](SmallWorld& w) { return fovea_backend_plan(nullptr, &w.batch, nullptr); },
       "backend is null"},
      {"other_handle",
       [](SmallWorld& w) {
         return fovea_backend_plan(as<fovea_backend>(w.pool), &w.batch, nullptr);
       },
       "backend is a fovea_kv_pool, must be a fovea_backend"},
      {"no_handle",
       [](SmallWorld& w) { return fovea_backend_plan(as<fovea_backend>(&w.q), &w.batch, nullptr); },
       "is not a handle, must be a fovea_backend"},
      {"misaligned_handle",
       [](SmallWorld& w) {
         char* const moved = reinterpret_cast<char*>(w.backend) + 1;
         return fovea_backend_plan(as<fovea_backend>(moved), &w.batch, nullptr);
       },
       "backend is at"},
      {"null_place_for_a_handle", [](SmallWorld&) { return fovea_thread_pool_create(1, nullptr); },
       "pool is null"},
      {"state_pool_for_a_kv_pool",
       [](SmallWorld& w) {
         fovea_backend* made = nullptr;
         return fovea_backend_create(w.selection, as<fovea_kv_pool>(w.states), nullptr, w.threads,
                                     &made);
       },
       "kv is a fovea_state_pool, must be a fovea_kv_pool"},
      {"no_pool",
       [](SmallWorld& w) {
         fovea_backend* made = nullptr;
         return fovea_backend_create(w.selection, nullptr, nullptr, w.threads, &made);
       },
       "kv is null"},
      {"no_threads",
       [](SmallWorld& w) {
         fovea_backend* made = nullptr;
         return fovea_backend_create(w.selection, w.pool, nullptr, nullptr, &made);
       },
       "threads is null"},
      {"destroyed_as_another_kind",
       [](SmallWorld& w) { return fovea_merger_destroy(as<fovea_merger>(w.pool)); },
       "merger is a fovea_kv_pool"},
      {"window_call_on_a_plain_pool",
       [](SmallWorld& w) { return fovea_window_kv_pool_map(w.pool, nullptr, 0); },
       "fovea_window_kv_pool_create"},
  };
}

std::vector<Misuse> structs() {
  return {
      {"null_struct", [](SmallWorld& w) { return fovea_backend_plan(w.backend, nullptr, nullptr); },
       "batch is null"},
      changed(
          "size_0", [](SmallWorld& w) { w.batch.struct_size = 0; }, "batch.struct_size is 0"),
      changed(
          "size_beyond_any_version", [](SmallWorld& w) { w.batch.struct_size = uint32_t{1} << 31; },
          "batch.struct_size is 2147483648"),
      changed(
          "size_no_multiple", [](SmallWorld& w) { w.layer.struct_size -= 4; }, "layer.struct_size"),
      changed(
          "mode", [](SmallWorld& w) { w.batch.mode = 300; }, "mode is 300, must be in [0, 4]"),
      changed(
          "flag", [](SmallWorld& w) { w.layer.save_kv = 2; }, "save_kv is 2, must be 0 or 1"),
      changed(
          "reserved", [](SmallWorld& w) { w.batch.reserved = 1; }, "batch.reserved is 1"),
      changed(
          "requests", [](SmallWorld& w) { w.batch.requests = 3; }, "requests is 3"),
      changed(
          "tokens", [](SmallWorld& w) { w.batch.tokens = 9; }, "tokens is 9"),
      changed(
          "entry_tokens", [](SmallWorld& w) { w.batch.entry_tokens = 3; },
          "table.entry_tokens is 3"),
      changed(
          "missing_array", [](SmallWorld& w) { w.batch.kv_lens = nullptr; }, "kv_lens"),
      changed(
          "missing_tensor", [](SmallWorld& w) { w.layer.out = nullptr; }, "out is null"),
      changed(
          "unwanted_tensor", [](SmallWorld& w) { w.layer.alibi_slopes = w.sinks.view(); },
          "scores.alibi_slopes is given"),
      changed(
          "layer", [](SmallWorld& w) { w.layer.layer = 2; }, "layer is 2"),
      {"forward_without_a_plan",
       [](SmallWorld& w) {
         EXPECT_EQ(fovea_backend_reserve(w.backend, &w.limits, nullptr, 0), FOVEA_OK);
         return w.forward();
       },
       "plan"},
      {"kind",
       [](SmallWorld& w) {
         fovea_attention_spec spec = w.spec;
         spec.kind = 256;
         w.request.spec = &spec;
         fovea_selection* made = nullptr;
         return fovea_selection_create(&w.request, &made);
       },
       "kind is 256, must be in [0, 7]"},
      {"backend_name",
       [](SmallWorld& w) {
         w.request.backend = "fast";
         fovea_selection* made = nullptr;
         const fovea_status status = fovea_selection_create(&w.request, &made);
         w.request.backend = nullptr;
         return status;
       },
       "unknown backend 'fast'"},
      {"device_kind",
       [](SmallWorld& w) {
         fovea_kv_pool* made = nullptr;
         return fovea_kv_pool_create(&w.cache, 8, {7, 0}, &made);
       },
       "device.kind is 7"},
  };
}

fovea_status managed(uint64_t flags, uint32_t major, int32_t writes) {
  DLManagedTensorVersioned tensor{};
  tensor.version = {major, 1};
  tensor.flags = flags;
  const DLTensor* view = nullptr;
  return fovea_tensor_of_managed(&tensor, writes, "out", &view);
}

std::vector<Misuse> calls() {
  return {
      {"read_only", [](SmallWorld&) { return managed(DLPACK_FLAG_BITMASK_READ_ONLY, 1, 1); },
       "out is read-only, but Fovea writes it"},
      {"dlpack_version", [](SmallWorld&) { return managed(0, 2, 0); },
       "out has DLPack version 2.1, must be 1.x"},
      {"workspace_null",
       [](SmallWorld& w) { return fovea_backend_reserve(w.backend, &w.limits, nullptr, 64); },
       "workspace is null, of 64 bytes"},
      {"workspace_small",
       [](SmallWorld& w) { return fovea_backend_reserve(w.backend, &w.limits, w.q.data, 64); },
       "64", FOVEA_WORKSPACE_TOO_SMALL},
      {"text_small",
       [](SmallWorld& w) {
         char text[2];
         size_t bytes = sizeof text;
         return fovea_selection_explain(w.selection, text, &bytes);
       },
       "text has room for 2, needs"},
      {"text_size_null",
       [](SmallWorld& w) { return fovea_selection_explain(w.selection, nullptr, nullptr); },
       "the size of text is null"},
      {"candidate",
       [](SmallWorld& w) {
         size_t count = 0;
         return fovea_candidate_reasons(w.selection, 1000, &count);
       },
       "candidate is 1000"},
      {"row",
       [](SmallWorld& w) {
         int32_t* row = nullptr;
         return fovea_request_table_row(w.table, 4, &row);
       },
       "request row is 4, the table has 4"},
      {"released_twice", [](SmallWorld& w) { return fovea_page_allocator_release(w.allocator, 3); },
       "page 3 is free"},
  };
}

fovea_status load_engine(void (*change)(fovea_engine_options&)) {
  fovea_engine_options options;
  EXPECT_EQ(fovea_engine_options_init(&options, sizeof options), FOVEA_OK);
  change(options);
  fovea_engine* engine = nullptr;
  return fovea_engine_load(&options, &engine);
}

std::vector<Misuse> others() {
  return {
      {"match_capacity",
       [](SmallWorld& w) {
         const int32_t tokens[8] = {};
         fovea_prefix prefix;
         fovea_prefix_match match;
         EXPECT_EQ(fovea_prefix_init(&prefix, sizeof prefix), FOVEA_OK);
         EXPECT_EQ(fovea_prefix_match_init(&match, sizeof match), FOVEA_OK);
         prefix.tokens = tokens;
         prefix.token_count = 8;
         return fovea_prefix_cache_match(w.prefix_cache, &prefix, 8, &match);
       },
       "match.page_capacity is 0, needs 2"},
      {"lent_without_v",
       [](SmallWorld& w) {
         const fovea_kv_memory layers[2] = {{.k = w.k.view()}};
         fovea_lent_pool lent;
         EXPECT_EQ(fovea_lent_pool_init(&lent, sizeof lent), FOVEA_OK);
         lent.spec = &w.cache;
         lent.layers = layers;
         fovea_kv_pool* made = nullptr;
         return fovea_kv_pool_lend(&lent, &made);
       },
       "layers[0].v is null"},
      {"lent_shape",
       [](SmallWorld& w) {
         const fovea_kv_memory layers[2] = {{.k = w.k.view(), .v = w.v.view()}};
         fovea_lent_pool lent;
         EXPECT_EQ(fovea_lent_pool_init(&lent, sizeof lent), FOVEA_OK);
         lent.spec = &w.cache;
         lent.layers = layers;
         fovea_kv_pool* made = nullptr;
         return fovea_kv_pool_lend(&lent, &made);
       },
       "layers[0].k has 3 dimensions, must have 4: [pages, page_size, kv_heads, dim]"},
      {"merged_width",
       [](SmallWorld& w) {
         const fovea_attention_state into = {w.out.view(), w.lse.view()};
         const fovea_attention_state part = {w.k.view(), w.lse.view()};
         return fovea_merger_merge(w.merger, &into, &part, kWorldTokens, nullptr);
       },
       "part.out has the shape [5, 2, 32]"},
      {"moved_address",
       [](SmallWorld& w) {
         fovea_pass_addresses* now = nullptr;
         EXPECT_EQ(fovea_pass_addresses_create(&now), FOVEA_OK);
         EXPECT_EQ(fovea_pass_addresses_add(w.addresses, "weights", w.q.data), FOVEA_OK);
         EXPECT_EQ(fovea_pass_addresses_add(now, "weights", w.k.data), FOVEA_OK);
         const fovea_status status = fovea_pass_addresses_check(w.addresses, now);
         EXPECT_EQ(fovea_pass_addresses_destroy(now), FOVEA_OK);
         return status;
       },
       "weights is at"},
      {"engine_path", [](SmallWorld&) { return load_engine([](fovea_engine_options&) {}); },
       "options.model_path is null"},
      {"engine_file",
       [](SmallWorld&) {
         return load_engine([](fovea_engine_options& given) { given.model_path = "/nowhere"; });
       },
       "/nowhere", FOVEA_IO},
      {"engine_mixed_tokens",
       [](SmallWorld&) {
         return load_engine([](fovea_engine_options& given) {
           given.model_path = "/nowhere";
           given.max_mixed_tokens = 513;
         });
       },
       "max_mixed_tokens is 513, must be in [0, 512]"},
  };
}

std::vector<Misuse> all_misuse() {
  std::vector<Misuse> all;
  for (const auto& part :
       {handles(), structs(), misused_arrays(), misused_tensors(), calls(), others()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

class MisuseInC : public ::testing::TestWithParam<Misuse> {};

TEST_P(MisuseInC, NamesTheArgument) {
  const Misuse& misuse = GetParam();
  SmallWorld world;
  ASSERT_EQ(world.plan(), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(world.forward(), FOVEA_OK) << fovea_last_error();
  const std::vector<float> expected = world.output();
  EXPECT_EQ(misuse.call(world), misuse.status);
  EXPECT_NE(std::string(fovea_last_error()).find(misuse.message), std::string::npos)
      << fovea_last_error();
  // Nothing was damaged.
  world.reset();
  ASSERT_EQ(fovea_backend_reserve(world.backend, &world.limits, nullptr, 0), FOVEA_OK);
  ASSERT_EQ(world.plan(), FOVEA_OK) << fovea_last_error();
  ASSERT_EQ(world.forward(), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(world.output(), expected);
}

INSTANTIATE_TEST_SUITE_P(Table, MisuseInC, ::testing::ValuesIn(all_misuse()),
                         [](const auto& misuse) { return misuse.param.name; });

}  // namespace
}  // namespace fovea::test
