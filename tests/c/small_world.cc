// SPDX-License-Identifier: Apache-2.0
#include "c/small_world.h"

#include <cmath>
#include <cstring>

#include "c/check_status.h"

namespace fovea::test {
namespace {

constexpr size_t kRegion = size_t{1} << 17, kMiddle = kRegion / 2;
constexpr int32_t kArrays = 15;

template <typename T>
void write(const WorldArray& array, std::initializer_list<T> values) {
  std::memcpy(array.data, values.begin(), values.size() * sizeof(T));
}

void write_waves(const WorldArray& array, float step) {
  for (size_t i = 0; i < array.bytes / sizeof(float); ++i) {
    const float value = std::sin(static_cast<float>(i) * step);
    std::memcpy(array.data + i * sizeof(float), &value, sizeof(float));
  }
}

}  // namespace

SmallWorld::SmallWorld() : memory_(kArrays * kRegion + 64) {
  make_specs();
  make_handles();
  reset();
}

SmallWorld::~SmallWorld() {
  fovea_pass_addresses_destroy(addresses);
  fovea_merger_destroy(merger);
  fovea_backend_destroy(backend);
  fovea_prefix_cache_destroy(prefix_cache);
  fovea_state_pool_destroy(states);
  fovea_kv_pool_destroy(window_pool);
  fovea_kv_pool_destroy(pool);
  fovea_page_allocator_destroy(allocator);
  fovea_request_table_destroy(table);
  fovea_selection_destroy(selection);
  fovea_thread_pool_destroy(threads);
}

void SmallWorld::make_specs() {
  check_status(fovea_attention_spec_init(&spec, sizeof spec));
  spec.q_heads = kWorldQHeads;
  spec.kv_heads = kWorldKvHeads;
  spec.head_dim = kWorldDim;
  spec.has_rope = 1;
  spec.needs_lse = 1;
  spec.scores.has_sinks = 1;
  check_status(fovea_kv_cache_spec_init(&cache, sizeof cache));
  cache.layers = 2;
  cache.kv_heads = kWorldKvHeads;
  cache.head_dim = kWorldDim;
  cache.page_size = kWorldPageSize;
  window_cache = cache;
  window_cache.window = 8;
  check_status(fovea_state_cache_spec_init(&state, sizeof state));
  state.layers = 1;
  state.conv_dim = 8;
  state.conv_width = 4;
  state.heads = 2;
  state.rows = state.columns = 4;
  check_status(fovea_batch_limits_init(&limits, sizeof limits));
  limits.max_requests = kWorldRequests;
  limits.max_tokens = limits.max_q_len = 8;
  limits.max_kv_len = kWorldContext;
  check_status(fovea_selection_request_init(&request, sizeof request));
  request.spec = &spec;
  request.cache = &cache;
  request.limits = &limits;
}

void SmallWorld::make_handles() {
  check_status(fovea_thread_pool_create(1, &threads));
  check_status(fovea_selection_create(&request, &selection));
  check_status(fovea_request_table_create(4, kWorldContext, &table));
  check_status(fovea_page_allocator_create(kWorldPages, kWorldPageSize, &allocator));
  check_status(fovea_kv_pool_create(&cache, kWorldPages, cpu, &pool));
  check_status(fovea_window_kv_pool_create(&window_cache, 4, int64_t{kWorldPages} * kWorldPageSize,
                                           cpu, &window_pool));
  check_status(fovea_state_pool_create(&state, 4, cpu, &states));
  check_status(fovea_prefix_cache_create(allocator, nullptr, &prefix_cache));
  check_status(fovea_backend_create(selection, pool, nullptr, threads, &backend));
  check_status(fovea_backend_reserve(backend, &limits, nullptr, 0));
  check_status(fovea_merger_create(FOVEA_F32, kWorldQHeads, kWorldDim, cpu, threads, &merger));
  check_status(fovea_pass_addresses_create(&addresses));
}

void SmallWorld::place(WorldArray& array, fovea_dtype dtype, std::initializer_list<int64_t> shape,
                       int32_t element) {
  const auto base = (reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64;
  array.data = reinterpret_cast<char*>(base + placed_++ * kRegion + kMiddle);
  array.bytes = static_cast<size_t>(element);
  for (const int64_t extent : shape) array.bytes *= static_cast<size_t>(extent);
  check_status(fovea_tensor_init(&array.tensor, array.data, dtype, cpu, shape.begin(),
                                 static_cast<int32_t>(shape.size())));
}

void SmallWorld::reset() {
  placed_ = 0;
  std::memset(memory_.data(), 0, memory_.size());
  place(q_indptr, FOVEA_I32, {kWorldRequests + 1}, 4);
  place(kv_lens, FOVEA_I32, {kWorldRequests}, 4);
  place(rows, FOVEA_I32, {kWorldRequests}, 4);
  place(slots, FOVEA_I32, {kWorldRequests, kWorldContext / kWorldPageSize}, 4);
  place(out_slots, FOVEA_I64, {kWorldTokens}, 8);
  place(positions, FOVEA_I32, {kWorldTokens}, 4);
  place(q, FOVEA_F32, {kWorldTokens, kWorldQHeads, kWorldDim}, 4);
  place(k, FOVEA_F32, {kWorldTokens, kWorldKvHeads, kWorldDim}, 4);
  place(v, FOVEA_F32, {kWorldTokens, kWorldKvHeads, kWorldDim}, 4);
  place(out, FOVEA_F32, {kWorldTokens, kWorldQHeads, kWorldDim}, 4);
  place(lse, FOVEA_F32, {kWorldTokens, kWorldQHeads}, 4);
  place(sinks, FOVEA_F32, {kWorldQHeads}, 4);
  place(cos, FOVEA_F32, {64, kWorldDim / 2}, 4);
  place(sin, FOVEA_F32, {64, kWorldDim / 2}, 4);
  place(rotary_positions, FOVEA_I32, {kWorldTokens}, 4);
  // Request 0 has 3 new tokens in page 1, request 1 has 2 in page 3.
  write<int32_t>(q_indptr, {0, 3, 5});
  write<int32_t>(kv_lens, {3, 2});
  write<int32_t>(rows, {0, 1});
  write<int32_t>(slots, {1, 2, 0, 0, 3, 4, 0, 0});
  write<int64_t>(out_slots, {4, 5, 6, 12, 13});
  write<int32_t>(positions, {0, 1, 2, 0, 1});
  write<int32_t>(rotary_positions, {0, 1, 2, 0, 1});
  float step = 0.1f;
  for (WorldArray* const array : {&q, &k, &v, &sinks, &cos, &sin})
    write_waves(*array, step *= 1.3f);

  check_status(fovea_batch_init(&batch, sizeof batch));
  batch.mode = FOVEA_MODE_EXTEND;
  batch.requests = kWorldRequests;
  batch.tokens = kWorldTokens;
  batch.q_indptr = q_indptr.view();
  batch.kv_lens = kv_lens.view();
  batch.request_rows = rows.view();
  batch.table = slots.view();
  batch.entry_tokens = kWorldPageSize;
  batch.out_slots = out_slots.view();
  batch.positions = positions.view();
  check_status(fovea_layer_tensors_init(&layer, sizeof layer));
  layer.q = q.view();
  layer.k = k.view();
  layer.v = v.view();
  layer.out = out.view();
  layer.lse = lse.view();
  layer.sinks = sinks.view();
  layer.rotary.cos = cos.view();
  layer.rotary.sin = sin.view();
  layer.rotary.positions = rotary_positions.view();
}

std::vector<float> SmallWorld::output() const {
  std::vector<float> values(out.bytes / sizeof(float));
  std::memcpy(values.data(), out.data, out.bytes);
  return values;
}

std::vector<void*> SmallWorld::handles() const {
  return {threads, selection,    table,   allocator, pool,     window_pool,
          states,  prefix_cache, backend, merger,    addresses};
}

std::vector<WorldArray*> SmallWorld::arrays() {
  return {&q_indptr, &kv_lens, &rows,  &slots, &out_slots, &positions,       &q, &k, &v,
          &out,      &lse,     &sinks, &cos,   &sin,       &rotary_positions};
}

}  // namespace fovea::test
