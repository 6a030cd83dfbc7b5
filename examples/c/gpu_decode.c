// SPDX-License-Identifier: Apache-2.0
// Decode steps of two requests on a GPU, in C: one pass over all layers is captured once and
// replayed while the requests grow. Built if the CUDA runtime is available. Exits with 77 if there
// is no GPU.
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fovea/fovea.h"

enum { kRequests = 2, kLayers = 2, kSteps = 100, kQHeads = 8, kKvHeads = 2, kHeadDim = 128 };
enum { kPages = 64, kPageSize = 16, kMaxContext = 1024 };

static fovea_device gpu;
static cudaStream_t stream;

static void check(fovea_status status) {
  if (status == FOVEA_OK) return;
  fprintf(stderr, "%s\n", fovea_last_error());
  exit(1);
}

static void check_cuda(cudaError_t status) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(status));
  exit(1);
}

// A host array and its copy in device memory, whose address never changes.
typedef struct mirrored {
  void* host;
  void* device;
  size_t bytes;
  fovea_tensor tensor;  // the device's
} mirrored;

static void mirror(mirrored* array, fovea_dtype dtype, size_t element, const int64_t* shape,
                   int32_t ndim) {
  array->bytes = element;
  for (int32_t i = 0; i < ndim; ++i) array->bytes *= (size_t)shape[i];
  array->host = calloc(1, array->bytes);
  check_cuda(cudaMalloc(&array->device, array->bytes));
  check_cuda(cudaMemsetAsync(array->device, 0, array->bytes, stream));
  check(fovea_tensor_init(&array->tensor, array->device, dtype, gpu, shape, ndim));
}

static void upload(const mirrored* array) {
  check_cuda(
      cudaMemcpyAsync(array->device, array->host, array->bytes, cudaMemcpyHostToDevice, stream));
}

static void release(mirrored* array) {
  check_cuda(cudaFree(array->device));
  free(array->host);
}

// bf16 is the upper half of an f32.
static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static float to_float(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

static void fill(const mirrored* array, float value) {
  uint16_t* values = array->host;
  for (size_t i = 0; i < array->bytes / sizeof *values; ++i) values[i] = to_bf16(value);
  upload(array);
}

// Arrays of a decode step, and the tensors that a model would provide.
static mirrored slots, rows, lengths, q_indptr, out_slots, q, k, v, out;

static void make_arrays(void) {
  const int64_t requests[] = {kRequests}, indptr[] = {kRequests + 1};
  const int64_t table[] = {kRequests + 1, kMaxContext};
  const int64_t queries[] = {kRequests, kQHeads, kHeadDim},
                keys[] = {kRequests, kKvHeads, kHeadDim};
  mirror(&slots, FOVEA_I32, sizeof(int32_t), table, 2);
  mirror(&rows, FOVEA_I32, sizeof(int32_t), requests, 1);
  mirror(&lengths, FOVEA_I32, sizeof(int32_t), requests, 1);
  mirror(&q_indptr, FOVEA_I32, sizeof(int32_t), indptr, 1);
  mirror(&out_slots, FOVEA_I64, sizeof(int64_t), requests, 1);
  mirror(&q, FOVEA_BF16, sizeof(uint16_t), queries, 3);
  mirror(&k, FOVEA_BF16, sizeof(uint16_t), keys, 3);
  mirror(&v, FOVEA_BF16, sizeof(uint16_t), keys, 3);
  mirror(&out, FOVEA_BF16, sizeof(uint16_t), queries, 3);
  fill(&q, 1);
  fill(&k, 1);
}

static void add_requests(fovea_request_table* table) {
  int32_t* const row = rows.host;
  int32_t* const indptr = q_indptr.host;
  for (int i = 0; i < kRequests; ++i) {
    check(fovea_request_table_allocate(table, &row[i]));
    indptr[i + 1] = i + 1;
  }
  upload(&rows);
  upload(&q_indptr);
}

// Adds a token to each request. Its slot is where the next pass stores k and v.
static void grow(fovea_request_table* table, fovea_page_allocator* pages) {
  for (int i = 0; i < kRequests; ++i) {
    int32_t* row = NULL;
    int32_t* const length = (int32_t*)lengths.host + i;
    int64_t* const slot = (int64_t*)out_slots.host + i;
    check(fovea_request_table_row(table, ((int32_t*)rows.host)[i], &row));
    const int64_t last = *length > 0 ? row[*length - 1] : -1;
    check(fovea_page_allocator_extend(pages, *length, *length + 1, last, slot));
    row[(*length)++] = (int32_t)*slot;
  }
  fovea_tensor whole;
  check(fovea_request_table_view(table, &whole));
  memcpy(slots.host, whole.view.data, slots.bytes);
  upload(&lengths);
  upload(&out_slots);
  upload(&slots);
}

static fovea_batch make_batch(void) {
  fovea_batch batch;
  check(fovea_batch_init(&batch, sizeof batch));
  batch.mode = FOVEA_MODE_DECODE;
  batch.requests = batch.tokens = kRequests;
  batch.q_indptr = &q_indptr.tensor.view;
  batch.kv_lens = &lengths.tensor.view;
  batch.request_rows = &rows.tensor.view;
  batch.table = &slots.tensor.view;
  batch.out_slots = &out_slots.tensor.view;
  return batch;
}

// Captures all work of a pass. Replays of the graph read the current contents of the arrays.
static cudaGraphExec_t capture_pass(fovea_backend* backend) {
  const fovea_batch batch = make_batch();
  fovea_layer_tensors layer;
  check(fovea_layer_tensors_init(&layer, sizeof layer));
  layer.q = &q.tensor.view;
  layer.k = &k.tensor.view;
  layer.v = &v.tensor.view;
  layer.out = &out.tensor.view;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t pass = NULL;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  check(fovea_backend_plan(backend, &batch, stream));
  for (layer.layer = 0; layer.layer < kLayers; ++layer.layer) {
    check(fovea_backend_forward(backend, &layer, stream));
  }
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiateWithFlags(&pass, graph, 0));
  check_cuda(cudaGraphDestroy(graph));
  return pass;
}

static fovea_backend* make_backend(const fovea_device_info* device, fovea_kv_pool** pool) {
  fovea_attention_spec spec;
  fovea_kv_cache_spec cache;
  fovea_batch_limits limits;
  fovea_selection_request request;
  check(fovea_attention_spec_init(&spec, sizeof spec));
  spec.q_heads = kQHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  spec.q_dtype = FOVEA_BF16;
  check(fovea_kv_cache_spec_init(&cache, sizeof cache));
  cache.dtype = FOVEA_BF16;
  cache.layers = kLayers;
  cache.kv_heads = kKvHeads;
  cache.head_dim = kHeadDim;
  cache.page_size = kPageSize;
  check(fovea_batch_limits_init(&limits, sizeof limits));
  limits.max_requests = limits.max_tokens = kRequests;
  limits.max_kv_len = kMaxContext;
  check(fovea_selection_request_init(&request, sizeof request));
  request.spec = &spec;
  request.cache = &cache;
  request.limits = &limits;
  request.device = device;
  fovea_selection* selection = NULL;
  check(fovea_selection_create(&request, &selection));
  char text[16384];
  size_t bytes = sizeof text;
  check(fovea_selection_explain(selection, text, &bytes));
  fputs(text, stdout);

  fovea_backend* backend = NULL;
  check(fovea_kv_pool_create(&cache, kPages, gpu, pool));
  check(fovea_backend_create(selection, *pool, NULL, NULL, &backend));
  check(fovea_backend_reserve(backend, &limits, NULL, 0));
  check(fovea_selection_destroy(selection));
  return backend;
}

static float first_output(void) {
  check_cuda(cudaMemcpyAsync(out.host, out.device, out.bytes, cudaMemcpyDeviceToHost, stream));
  check_cuda(cudaStreamSynchronize(stream));
  return to_float(*(uint16_t*)out.host);
}

int main(void) {
  char reason[256];
  size_t bytes = sizeof reason;
  check(fovea_why_no_gpu(reason, &bytes));
  if (bytes > 1) {
    puts(reason);
    return 77;
  }
  fovea_device_info device;
  check(fovea_device_info_init(&device, sizeof device));
  check(fovea_find_device("cuda", &device));
  gpu = device.device;
  check_cuda(cudaSetDevice(gpu.index));
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  fovea_kv_pool* pool = NULL;
  fovea_backend* backend = make_backend(&device, &pool);
  fovea_request_table* table = NULL;
  fovea_page_allocator* pages = NULL;
  check(fovea_request_table_create(kRequests + 1, kMaxContext, &table));
  check(fovea_page_allocator_create(kPages, kPageSize, &pages));
  make_arrays();
  add_requests(table);
  check_cuda(cudaDeviceSynchronize());
  const cudaGraphExec_t pass = capture_pass(backend);
  for (int step = 1; step <= kSteps; ++step) {
    grow(table, pages);
    fill(&v, (float)step);
    check_cuda(cudaGraphLaunch(pass, stream));
    check_cuda(cudaStreamSynchronize(stream));
  }
  const float mean = (1 + kSteps) / 2.0f, result = first_output();
  printf("after %d steps out[0] = %g, the mean is %g\n", (int)kSteps, (double)result, (double)mean);

  check_cuda(cudaGraphExecDestroy(pass));
  mirrored* const arrays[] = {&slots, &rows, &lengths, &q_indptr, &out_slots, &q, &k, &v, &out};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) release(arrays[i]);
  fovea_page_allocator_destroy(pages);
  fovea_request_table_destroy(table);
  fovea_backend_destroy(backend);
  fovea_kv_pool_destroy(pool);
  check_cuda(cudaStreamDestroy(stream));
  return fabsf(result - mean) <= mean / 128 ? 0 : 1;
}
