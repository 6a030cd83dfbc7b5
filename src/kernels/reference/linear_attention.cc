// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/float_types.h"
#include "kernels/reference/reference.h"

namespace fovea::kernels::reference {
namespace {

// States are rounded to the pool's type after every token, so that the bits do not depend on how a
// prompt is divided into batches. A token reads its state in f32.

struct Request {
  int64_t begin = 0, end = 0;  // tokens
  int64_t slot = -1;
  bool starts_from_zero = false;
};

Request request_of(const StateBatch& batch, int32_t index) {
  const int32_t begin = batch.q_indptr[index];
  const int32_t end = batch.q_indptr[index + 1];
  return {begin, end, batch.state_slots[index], batch.kv_lens[index] == end - begin};
}

// A part of a request's state.
struct State {
  void* pool;
  DType dtype;
  int64_t begin, size;  // its elements in the pool
  int64_t slot_stride;

  float get(int64_t i) const { return load_float(pool, dtype, begin + i); }
  void set(int64_t i, float value) const { store_float(pool, dtype, begin + i, value); }
};

// Copies the state to its place in the snapshot after `token`.
void take_snapshot(const StateBatch& batch, const Request& request, int64_t token,
                   const State& state) {
  const int64_t slot = batch.snapshot_slots ? batch.snapshot_slots[token] : -1;
  if (slot < 0) return;
  const int64_t away = (slot - request.slot) * state.slot_stride;
  for (int64_t i = 0; i < state.size; ++i) state.set(away + i, state.get(i));
}

// Returns a head's state of a request, cleared if the request starts from zero.
template <typename Params>
State head_state(const Params& params, const Request& request, int64_t head, int64_t size) {
  const State state = {.pool = params.state,
                       .dtype = params.state_dtype,
                       .begin = request.slot * params.state_slot_stride + head * size,
                       .size = size,
                       .slot_stride = params.state_slot_stride};
  for (int64_t i = 0; request.starts_from_zero && i < size; ++i) state.set(i, 0);
  return state;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

// One channel of one request: `taps` slides over the last width inputs, oldest first.
void convolve(const CausalConvParams& params, const Request& request, int32_t channel) {
  const int32_t width = params.width;
  float* state = params.state + request.slot * params.state_slot_stride +
                 static_cast<int64_t>(channel) * (width - 1);
  const State window = {.pool = state,
                        .dtype = DType::f32,
                        .begin = 0,
                        .size = width - 1,
                        .slot_stride = params.state_slot_stride};
  std::vector<float> taps(static_cast<size_t>(width), 0.0f);  // the first is pushed out at once
  if (!request.starts_from_zero) std::copy_n(state, width - 1, taps.begin() + 1);
  for (int64_t token = request.begin; token < request.end; ++token) {
    std::rotate(taps.begin(), taps.begin() + 1, taps.end());
    taps.back() = params.x[token * params.dim + channel];
    double sum = params.bias ? params.bias[channel] : 0.0;
    for (int32_t i = 0; i < width; ++i) {
      sum += static_cast<double>(params.weight[static_cast<int64_t>(channel) * width + i]) *
             static_cast<double>(taps[static_cast<size_t>(i)]);
    }
    params.y[token * params.y_token_stride + channel] =
        static_cast<float>(params.plain ? sum : silu(sum));
    std::copy_n(taps.begin() + 1, width - 1, state);
    take_snapshot(params.batch, request, token, window);
  }
}

void clear_rows(float* out, const Request& request, int64_t token_stride, int64_t size) {
  for (int64_t token = request.begin; token < request.end; ++token) {
    std::fill_n(out + token * token_stride, size, 0.0f);
  }
}

// Returns dim values at `from`, divided by their norm with l2_normalise.
std::vector<double> load_vector(const float* from, int32_t dim, bool l2_normalise) {
  std::vector<double> vector(from, from + dim);
  if (!l2_normalise) return vector;
  double squares = 1e-6;
  for (double x : vector) squares += x * x;
  for (double& x : vector) x /= std::sqrt(squares);
  return vector;
}

// One head of gated delta net, or of KDA, whose decays differ between the columns of the state.
template <typename Params>
void delta_head(const Params& params, const Request& request, int32_t head, int64_t decays) {
  const int64_t key_dim = params.key_dim;
  const int64_t value_dim = params.value_dim;
  const int64_t key_head = static_cast<int64_t>(head) * params.key_heads / params.value_heads;
  const int64_t keys = params.key_heads * key_dim;
  const int64_t row_size = 2 * keys + params.value_heads * value_dim;
  const State state = head_state(params, request, head, value_dim * key_dim);
  std::vector<double> alpha(static_cast<size_t>(key_dim));

  for (int64_t token = request.begin; token < request.end; ++token) {
    const float* row = params.qkv + token * row_size;
    const std::vector<double> q =
        load_vector(row + key_head * key_dim, params.key_dim, params.l2_normalise_qk);
    const std::vector<double> k =
        load_vector(row + keys + key_head * key_dim, params.key_dim, params.l2_normalise_qk);
    const float* v = row + 2 * keys + head * value_dim;
    const int64_t gate = token * params.value_heads + head;
    for (int64_t j = 0; j < key_dim; ++j) {
      alpha[j] = std::exp(static_cast<double>(params.log_decay[gate * decays + j % decays]));
    }
    const double beta = params.beta[gate];
    float* out = params.out + token * params.out_token_stride + head * value_dim;
    for (int64_t i = 0; i < value_dim; ++i) {
      const int64_t row_begin = i * key_dim;
      double recalled = 0;  // the decayed state's value for k
      for (int64_t j = 0; j < key_dim; ++j) recalled += alpha[j] * state.get(row_begin + j) * k[j];
      double o = 0;
      for (int64_t j = 0; j < key_dim; ++j) {
        const auto s = static_cast<float>(alpha[j] * state.get(row_begin + j) +
                                          beta * (v[i] - recalled) * k[j]);
        state.set(row_begin + j, s);
        o += s * q[j];
      }
      out[i] = static_cast<float>(params.scale * o);
    }
    take_snapshot(params.batch, request, token, state);
  }
}

void lightning_head(const LightningParams& params, const Request& request, int32_t head) {
  const int64_t key_dim = params.key_dim;
  const int64_t value_dim = params.value_dim;
  const int64_t key_head = static_cast<int64_t>(head) * params.key_heads / params.value_heads;
  const int64_t keys = params.key_heads * key_dim;
  const int64_t row_size = 2 * keys + params.value_heads * value_dim;
  const State state = head_state(params, request, head, value_dim * key_dim);
  const double decay = std::exp(static_cast<double>(params.log_decay[head]));

  for (int64_t token = request.begin; token < request.end; ++token) {
    const float* row = params.qkv + token * row_size;
    const float* q = row + key_head * key_dim;
    const float* k = row + keys + key_head * key_dim;
    const float* v = row + 2 * keys + head * value_dim;
    float* out = params.out + token * params.out_token_stride + head * value_dim;
    for (int64_t i = 0; i < value_dim; ++i) {
      double o = 0;
      for (int64_t j = 0; j < key_dim; ++j) {
        const int64_t at = i * key_dim + j;
        const auto s = static_cast<float>(decay * state.get(at) + static_cast<double>(v[i]) * k[j]);
        state.set(at, s);
        o += static_cast<double>(s) * q[j];
      }
      out[i] = static_cast<float>(params.scale * o);
    }
    take_snapshot(params.batch, request, token, state);
  }
}

void mamba2_head(const Mamba2Params& params, const Request& request, int32_t head) {
  const int64_t head_dim = params.head_dim;
  const int64_t state_dim = params.state_dim;
  const int64_t group = static_cast<int64_t>(head) * params.groups / params.heads;
  const int64_t row_size = params.heads * head_dim + 2 * params.groups * state_dim;
  const State state = head_state(params, request, head, head_dim * state_dim);

  for (int64_t token = request.begin; token < request.end; ++token) {
    const float* row = params.xbc + token * row_size;
    const float* x = row + head * head_dim;
    const float* b = row + params.heads * head_dim + group * state_dim;
    const float* c = b + params.groups * state_dim;
    const int64_t gate = token * params.heads + head;
    const double decay = std::exp(static_cast<double>(params.log_decay[gate]));
    const double dt = params.dt[gate];
    const double skip = params.skip ? params.skip[head] : 0.0;
    float* out = params.out + token * params.out_token_stride + head * head_dim;
    for (int64_t i = 0; i < head_dim; ++i) {
      double y = skip * x[i];
      for (int64_t j = 0; j < state_dim; ++j) {
        const int64_t at = i * state_dim + j;
        const auto h = static_cast<float>(decay * state.get(at) + dt * x[i] * b[j]);
        state.set(at, h);
        y += h * c[j];
      }
      out[i] = static_cast<float>(y);
    }
    take_snapshot(params.batch, request, token, state);
  }
}

// One group of channels, the rows of its state.
void mamba1_group(const Mamba1Params& params, const Request& request, int32_t group) {
  const int64_t channels = params.channels / params.groups;
  const int64_t state_dim = params.state_dim;
  const int64_t row_size = params.channels + 2 * params.groups * state_dim;
  const State state = head_state(params, request, group, channels * state_dim);

  for (int64_t token = request.begin; token < request.end; ++token) {
    const float* row = params.xbc + token * row_size;
    const float* b = row + params.channels + group * state_dim;
    const float* c = b + params.groups * state_dim;
    for (int64_t i = 0; i < channels; ++i) {
      const int64_t channel = group * channels + i;
      const double x = row[channel];
      const double dt = params.dt[token * params.channels + channel];
      double y = params.skip ? params.skip[channel] * x : 0.0;
      for (int64_t j = 0; j < state_dim; ++j) {
        const int64_t at = i * state_dim + j;
        const double decay = std::exp(dt * params.a[channel * state_dim + j]);
        const auto h = static_cast<float>(decay * state.get(at) + dt * x * b[j]);
        state.set(at, h);
        y += static_cast<double>(h) * c[j];
      }
      params.out[token * params.out_token_stride + channel] = static_cast<float>(y);
    }
    take_snapshot(params.batch, request, token, state);
  }
}

// Calls body(request, head) for all heads of all requests that have tokens and a slot; others give
// zeros.
template <typename Params, typename Body>
void for_heads(const Params& params, int32_t heads, int32_t width, ThreadPool& threads,
               const Body& body) {
  const int64_t tasks = static_cast<int64_t>(params.batch.requests) * heads;
  threads.parallel_for(tasks, [&](int64_t task, int) {
    const Request request = request_of(params.batch, static_cast<int32_t>(task / heads));
    const auto head = static_cast<int32_t>(task % heads);
    if (request.begin == request.end) return;
    if (request.slot < 0) {
      clear_rows(params.out + static_cast<int64_t>(head) * width, request, params.out_token_stride,
                 width);
    } else {
      body(request, head);
    }
  });
}

}  // namespace

void causal_conv(const CausalConvParams& params) {
  for (int32_t index = 0; index < params.batch.requests; ++index) {
    const Request request = request_of(params.batch, index);
    if (request.begin == request.end) continue;
    if (request.slot < 0) {
      clear_rows(params.y, request, params.y_token_stride, params.dim);
      continue;
    }
    for (int32_t channel = 0; channel < params.dim; ++channel) convolve(params, request, channel);
  }
}

void gated_delta_net(const GatedDeltaNetParams& params, ThreadPool& threads) {
  for_heads(params, params.value_heads, params.value_dim, threads,
            [&](const Request& request, int32_t head) { delta_head(params, request, head, 1); });
}

void mamba2(const Mamba2Params& params, ThreadPool& threads) {
  for_heads(params, params.heads, params.head_dim, threads,
            [&](const Request& request, int32_t head) { mamba2_head(params, request, head); });
}

void mamba1(const Mamba1Params& params, ThreadPool& threads) {
  for_heads(params, params.groups, params.channels / params.groups, threads,
            [&](const Request& request, int32_t group) { mamba1_group(params, request, group); });
}

void kda(const KdaParams& params, ThreadPool& threads) {
  for_heads(params, params.value_heads, params.value_dim, threads,
            [&](const Request& request, int32_t head) {
              delta_head(params, request, head, params.key_dim);
            });
}

void lightning(const LightningParams& params, ThreadPool& threads) {
  for_heads(params, params.value_heads, params.value_dim, threads,
            [&](const Request& request, int32_t head) { lightning_head(params, request, head); });
}

}  // namespace fovea::kernels::reference
