// SPDX-License-Identifier: Apache-2.0
// Attention of one prompt without a cache, in C, on the CPU: the program of docs/c_api.md.
#include <stdio.h>
#include <stdlib.h>

#include "fovea/fovea.h"

static void check(fovea_status status) {
  if (status == FOVEA_OK) return;
  fprintf(stderr, "%s\n", fovea_last_error());
  exit(1);
}

int main(void) {
  enum { TOKENS = 4, HEADS = 2, DIM = 16, VALUES = TOKENS * HEADS * DIM };
  static float q[VALUES], k[VALUES], v[VALUES], out[VALUES];
  for (int i = 0; i < VALUES; ++i) v[i] = (float)(i / (VALUES / TOKENS));
  int32_t q_indptr[] = {0, TOKENS}, kv_lens[] = {TOKENS};
  const fovea_device cpu = {FOVEA_CPU, 0};
  const int64_t rows[] = {TOKENS, HEADS, DIM}, two[] = {2}, one[] = {1};

  fovea_attention_spec spec;
  fovea_batch_limits limits;
  fovea_selection_request request;
  check(fovea_attention_spec_init(&spec, sizeof spec));
  check(fovea_batch_limits_init(&limits, sizeof limits));
  check(fovea_selection_request_init(&request, sizeof request));
  spec.scope = FOVEA_RAGGED;
  spec.q_heads = spec.kv_heads = HEADS;
  spec.head_dim = DIM;
  limits.max_tokens = limits.max_q_len = limits.max_kv_len = TOKENS;
  request.spec = &spec;
  request.limits = &limits;
  fovea_selection* selection;
  fovea_thread_pool* threads;
  fovea_backend* backend;
  check(fovea_selection_create(&request, &selection));
  check(fovea_thread_pool_create(0, &threads));
  check(fovea_backend_create(selection, NULL, NULL, threads, &backend));
  check(fovea_backend_reserve(backend, &limits, NULL, 0));

  fovea_tensor t_q, t_k, t_v, t_out, t_indptr, t_lens;
  check(fovea_tensor_init(&t_q, q, FOVEA_F32, cpu, rows, 3));
  check(fovea_tensor_init(&t_k, k, FOVEA_F32, cpu, rows, 3));
  check(fovea_tensor_init(&t_v, v, FOVEA_F32, cpu, rows, 3));
  check(fovea_tensor_init(&t_out, out, FOVEA_F32, cpu, rows, 3));
  check(fovea_tensor_init(&t_indptr, q_indptr, FOVEA_I32, cpu, two, 1));
  check(fovea_tensor_init(&t_lens, kv_lens, FOVEA_I32, cpu, one, 1));
  fovea_batch batch;
  fovea_layer_tensors layer;
  check(fovea_batch_init(&batch, sizeof batch));
  check(fovea_layer_tensors_init(&layer, sizeof layer));
  batch.mode = FOVEA_MODE_EXTEND;
  batch.requests = 1;
  batch.tokens = TOKENS;
  batch.q_indptr = &t_indptr.view;
  batch.kv_lens = &t_lens.view;
  layer.q = &t_q.view;
  layer.k = &t_k.view;
  layer.v = &t_v.view;
  layer.out = &t_out.view;
  check(fovea_backend_plan(backend, &batch, NULL));
  check(fovea_backend_forward(backend, &layer, NULL));
  printf("the last token sees the mean: %g\n", (double)out[VALUES - 1]);
}
