// SPDX-License-Identifier: Apache-2.0
// Decode steps of two requests on the CPU, in C: selection, a pool, tables of slots, and one plan
// and one forward per step. Equal keys have equal weights, so out is the mean of the values so far.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "fovea/fovea.h"

enum { kRequests = 2, kSteps = 100, kQHeads = 8, kKvHeads = 2, kHeadDim = 64, kPageSize = 16 };
static const fovea_device kCpu = {FOVEA_CPU, 0};

static void check(fovea_status status) {
  if (status == FOVEA_OK) return;
  fprintf(stderr, "%s\n", fovea_last_error());
  exit(1);
}

static void fill(float* values, int count, float value) {
  for (int i = 0; i < count; ++i) values[i] = value;
}

// Prints the choice and the reasons against the other backends.
static void print_explanation(const fovea_selection* selection) {
  size_t bytes = 0;
  check(fovea_selection_explain(selection, NULL, &bytes));
  char* text = malloc(bytes);
  check(fovea_selection_explain(selection, text, &bytes));
  fputs(text, stdout);
  free(text);
}

static fovea_selection* choose(const fovea_attention_spec* spec, const fovea_kv_cache_spec* cache,
                               const fovea_batch_limits* limits) {
  fovea_selection_request request;
  check(fovea_selection_request_init(&request, sizeof request));
  request.spec = spec;
  request.cache = cache;
  request.limits = limits;
  fovea_selection* selection = NULL;
  check(fovea_selection_create(&request, &selection));
  return selection;
}

// Arrays of a decode step.
static int32_t rows[kRequests], lengths[kRequests], q_indptr[kRequests + 1];
static int64_t out_slots[kRequests];
static float q[kRequests * kQHeads * kHeadDim], k[kRequests * kKvHeads * kHeadDim];
static float v[kRequests * kKvHeads * kHeadDim], out[kRequests * kQHeads * kHeadDim];

// Adds a token to each request. Its slot is where the next pass stores k and v.
static void grow(fovea_request_table* table, fovea_page_allocator* pages) {
  for (int i = 0; i < kRequests; ++i) {
    int32_t* slots = NULL;
    check(fovea_request_table_row(table, rows[i], &slots));
    const int32_t length = lengths[i];
    const int64_t last = length > 0 ? slots[length - 1] : -1;
    check(fovea_page_allocator_extend(pages, length, length + 1, last, &out_slots[i]));
    slots[length] = (int32_t)out_slots[i];
    lengths[i] = length + 1;
  }
}

static void describe(fovea_tensor* tensor, void* data, fovea_dtype dtype, int64_t first,
                     int64_t second, int64_t third) {
  const int64_t shape[] = {first, second, third};
  const int32_t ndim = third > 0 ? 3 : second > 0 ? 2 : 1;
  check(fovea_tensor_init(tensor, data, dtype, kCpu, shape, ndim));
}

static void run(fovea_backend* backend, fovea_request_table* table, fovea_page_allocator* pages) {
  fovea_tensor t_indptr, t_lens, t_rows, t_slots, t_table, t_q, t_k, t_v, t_out;
  describe(&t_indptr, q_indptr, FOVEA_I32, kRequests + 1, 0, 0);
  describe(&t_lens, lengths, FOVEA_I32, kRequests, 0, 0);
  describe(&t_rows, rows, FOVEA_I32, kRequests, 0, 0);
  describe(&t_slots, out_slots, FOVEA_I64, kRequests, 0, 0);
  describe(&t_q, q, FOVEA_F32, kRequests, kQHeads, kHeadDim);
  describe(&t_k, k, FOVEA_F32, kRequests, kKvHeads, kHeadDim);
  describe(&t_v, v, FOVEA_F32, kRequests, kKvHeads, kHeadDim);
  describe(&t_out, out, FOVEA_F32, kRequests, kQHeads, kHeadDim);
  check(fovea_request_table_view(table, &t_table));

  fovea_batch batch;
  check(fovea_batch_init(&batch, sizeof batch));
  batch.mode = FOVEA_MODE_DECODE;
  batch.requests = batch.tokens = kRequests;
  batch.q_indptr = &t_indptr.view;
  batch.kv_lens = &t_lens.view;
  batch.request_rows = &t_rows.view;
  batch.table = &t_table.view;
  batch.out_slots = &t_slots.view;
  fovea_layer_tensors layer;
  check(fovea_layer_tensors_init(&layer, sizeof layer));
  layer.q = &t_q.view;
  layer.k = &t_k.view;
  layer.v = &t_v.view;
  layer.out = &t_out.view;
  for (int step = 1; step <= kSteps; ++step) {
    grow(table, pages);
    fill(v, kRequests * kKvHeads * kHeadDim, (float)step);
    check(fovea_backend_plan(backend, &batch, NULL));
    check(fovea_backend_forward(backend, &layer, NULL));
  }
}

int main(void) {
  fovea_attention_spec spec;
  check(fovea_attention_spec_init(&spec, sizeof spec));
  spec.q_heads = kQHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  fovea_kv_cache_spec cache;
  check(fovea_kv_cache_spec_init(&cache, sizeof cache));
  cache.layers = 1;
  cache.kv_heads = kKvHeads;
  cache.head_dim = kHeadDim;
  cache.page_size = kPageSize;
  fovea_batch_limits limits;
  check(fovea_batch_limits_init(&limits, sizeof limits));
  limits.max_requests = limits.max_tokens = kRequests;
  limits.max_kv_len = kSteps;
  fovea_selection* selection = choose(&spec, &cache, &limits);
  print_explanation(selection);

  fovea_kv_pool* pool = NULL;
  fovea_thread_pool* threads = NULL;
  fovea_backend* backend = NULL;
  fovea_request_table* table = NULL;
  fovea_page_allocator* pages = NULL;
  const int64_t page_count = 1 + kRequests * ((kSteps + kPageSize - 1) / kPageSize);
  check(fovea_kv_pool_create(&cache, page_count, kCpu, &pool));
  check(fovea_thread_pool_create(0, &threads));
  check(fovea_backend_create(selection, pool, NULL, threads, &backend));
  check(fovea_backend_reserve(backend, &limits, NULL, 0));
  check(fovea_request_table_create(kRequests + 1, kSteps, &table));
  check(fovea_page_allocator_create(page_count, kPageSize, &pages));
  for (int i = 0; i < kRequests; ++i) {
    check(fovea_request_table_allocate(table, &rows[i]));
    q_indptr[i + 1] = i + 1;
  }
  fill(q, kRequests * kQHeads * kHeadDim, 1);
  fill(k, kRequests * kKvHeads * kHeadDim, 1);
  run(backend, table, pages);

  const float mean = (1 + kSteps) / 2.0f;
  printf("after %d steps out[0] = %g, the mean is %g\n", (int)kSteps, (double)out[0], (double)mean);
  fovea_backend_destroy(backend);
  fovea_page_allocator_destroy(pages);
  fovea_request_table_destroy(table);
  fovea_thread_pool_destroy(threads);
  fovea_kv_pool_destroy(pool);
  fovea_selection_destroy(selection);
  return fabsf(out[0] - mean) <= mean * 1e-5f ? 0 : 1;
}
