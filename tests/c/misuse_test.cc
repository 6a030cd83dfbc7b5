// SPDX-License-Identifier: Apache-2.0
// Wrong arguments of every kind give the documented status and a message that names the argument,
// its value and the limit. The handles stay usable.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "c/small_world.h"

namespace fovea::test {
namespace {

struct Misuse {
  std::string name;
  std::function<fovea_status(SmallWorld&)> call;
  std::string message;  // a part of it
  fovea_status status = FOVEA_INVALID_ARGUMENT;
};

void PrintTo(const Misuse& misuse, std::ostream* to) { *to << misuse.name; }

template <typename H, typename Other>
H* as(Other* handle) {
  return reinterpret_cast<H*>(handle);
}

// Plans a batch with one tensor changed.
Misuse plan_with(const std::string& name, WorldArray SmallWorld::*array,
                 const std::function<void(DLTensor&)>& change, const std::string& message) {
  return {name,
          [=](SmallWorld& world) {
            change((world.*array).tensor.view);
            return world.plan();
          },
          message};
}

// Plans, then runs a layer with one tensor changed.
Misuse forward_with(const std::string& name, WorldArray SmallWorld::*array,
                    const std::function<void(DLTensor&)>& change, const std::string& message) {
  return {name,
          [=](SmallWorld& world) {
            EXPECT_EQ(world.plan(), FOVEA_OK) << fovea_last_error();
            change((world.*array).tensor.view);
            return world.forward();
          },
          message};
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
       "kind is 256, must be in [0, 3]"},
      {"backend_name",
       [](SmallWorld& w) {
         w.request.backend = "fast";
         fovea_selection* made = nullptr;
         const fovea_status status = fovea_selection_create(&w.request, &made);
         w.request.backend = nullptr;
         return status;
       },
       "unknown backend 'fast'"},
      {"device",
       [](SmallWorld& w) {
         fovea_kv_pool* made = nullptr;
         return fovea_kv_pool_create(&w.cache, 8, {7, 0}, &made);
       },
       "device.kind is 7"},
  };
}

constexpr int64_t kHuge = int64_t{1} << 60;

std::vector<Misuse> arrays() {
  using W = SmallWorld;
  return {
      plan_with(
          "device", &W::q_indptr, [](DLTensor& t) { t.device.device_type = kDLCUDA; },
          "q_indptr is on device_type 2, device_id 0, must be on cpu"),
      plan_with(
          "dtype", &W::q_indptr, [](DLTensor& t) { t.dtype.bits = 64; },
          "q_indptr: dtype is (code 0, 64 bits), must be int32"),
      plan_with(
          "lanes", &W::kv_lens, [](DLTensor& t) { t.dtype.lanes = 2; },
          "kv_lens: dtype.lanes is 2"),
      plan_with(
          "dimensions", &W::rows, [](DLTensor& t) { t.ndim = 2; },
          "request_rows has 2 dimensions, must have 1"),
      plan_with(
          "shape_null", &W::rows, [](DLTensor& t) { t.shape = nullptr; },
          "request_rows: shape is null"),
      plan_with(
          "negative", &W::out_slots, [](DLTensor& t) { t.shape[0] = -1; },
          "out_slots: shape[0] is -1"),
      plan_with(
          "huge", &W::out_slots, [](DLTensor& t) { t.shape[0] = kHuge; },
          "out_slots: shape[0] is 1152921504606846976"),
      plan_with(
          "short", &W::out_slots, [](DLTensor& t) { t.shape[0] = 4; },
          "out_slots has 4 elements, the batch needs 5"),
      plan_with(
          "gaps", &W::positions, [](DLTensor& t) { t.strides[0] = 2; },
          "positions: strides[0] is 2, must be 1"),
      plan_with(
          "data_null", &W::kv_lens, [](DLTensor& t) { t.data = nullptr; }, "kv_lens: data is null"),
      plan_with(
          "byte_offset", &W::kv_lens, [](DLTensor& t) { t.byte_offset = 2; },
          "(byte_offset 2), must be aligned to 4 bytes"),
      plan_with(
          "byte_offset_huge", &W::kv_lens, [](DLTensor& t) { t.byte_offset = UINT64_MAX; },
          "kv_lens: byte_offset is 18446744073709551615"),
      plan_with(
          "table_rows_overlap", &W::slots, [](DLTensor& t) { t.strides[0] = 3; },
          "table: strides[0] is 3, a row has 4 entries"),
      plan_with(
          "table_narrow", &W::slots, [](DLTensor& t) { t.shape[1] = 3; }, "a row of table has 12"),
  };
}

std::vector<Misuse> tensors() {
  using W = SmallWorld;
  return {
      forward_with(
          "device_of_q", &W::q,
          [](DLTensor& t) {
            t.device = {kDLCUDA, 1};
          },
          "q is on device_type 2, device_id 1, must be on cpu"),
      forward_with(
          "dtype_of_q", &W::q,
          [](DLTensor& t) {
            t.dtype = {kDLBfloat, 16, 1};
          },
          "q is bf16"),
      forward_with(
          "unknown_dtype", &W::q,
          [](DLTensor& t) {
            t.dtype = {kDLComplex, 64, 1};
          },
          "q: dtype is (code 5, 64 bits)"),
      forward_with(
          "few_tokens", &W::q, [](DLTensor& t) { t.shape[0] = 4; },
          "q has the shape [4, 4, 32], must be [5 or more, 4, 32]"),
      forward_with(
          "heads", &W::k, [](DLTensor& t) { t.shape[1] = 3; },
          "k has the shape [5, 3, 32], must be [5 or more, 2, 32]"),
      forward_with(
          "head_dim", &W::v, [](DLTensor& t) { t.shape[2] = 16; }, "v has the shape [5, 2, 16]"),
      forward_with(
          "inner_stride", &W::v, [](DLTensor& t) { t.strides[2] = 2; },
          "v: strides[2] is 2, must be 1"),
      forward_with(
          "overlapping_rows", &W::out, [](DLTensor& t) { t.strides[1] = 1; }, "out has strides of"),
      forward_with(
          "misaligned", &W::out, [](DLTensor& t) { t.data = static_cast<char*>(t.data) + 1; },
          "must be aligned to 4 bytes"),
      forward_with(
          "stride_beyond_memory", &W::q, [](DLTensor& t) { t.strides[0] = INT64_MAX; }, "q"),
      forward_with(
          "lse_with_gaps", &W::lse, [](DLTensor& t) { t.strides[0] = 8; },
          "lse: strides[0] is 8, must be 4"),
      forward_with(
          "few_sinks", &W::sinks, [](DLTensor& t) { t.shape[0] = 3; },
          "sinks has the shape [3], must be [4 or more]"),
      forward_with(
          "sin_unlike_cos", &W::sin, [](DLTensor& t) { t.shape[0] = 63; },
          "rotary.sin has the shape [63, 16], rotary.cos [64, 16]"),
      forward_with(
          "few_positions", &W::rotary_positions, [](DLTensor& t) { t.shape[0] = 4; },
          "rotary.positions has 4 elements, the batch needs 5"),
  };
}

fovea_status managed(uint64_t flags, uint32_t major, int32_t writes) {
  DLManagedTensorVersioned tensor{};
  tensor.version = {major, 1};
  tensor.flags = flags;
  const DLTensor* view = nullptr;
  return fovea_tensor_of_managed(&tensor, writes, "out", &view);
}

std::vector<Misuse> others() {
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
      {"engine_path",
       [](SmallWorld&) {
         fovea_engine_options options;
         EXPECT_EQ(fovea_engine_options_init(&options, sizeof options), FOVEA_OK);
         fovea_engine* engine = nullptr;
         return fovea_engine_load(&options, &engine);
       },
       "options.model_path is null"},
      {"engine_file",
       [](SmallWorld&) {
         fovea_engine_options options;
         EXPECT_EQ(fovea_engine_options_init(&options, sizeof options), FOVEA_OK);
         options.model_path = "/nowhere";
         fovea_engine* engine = nullptr;
         return fovea_engine_load(&options, &engine);
       },
       "/nowhere", FOVEA_IO},
  };
}

std::vector<Misuse> all_misuse() {
  std::vector<Misuse> all;
  for (const auto& part : {handles(), structs(), arrays(), tensors(), others()}) {
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
