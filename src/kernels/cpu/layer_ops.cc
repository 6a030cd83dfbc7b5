// SPDX-License-Identifier: Apache-2.0
// Plain loops, where accuracy and legibility come first. Only activations have vectors, because
// they take a visible part of a small model's prompt.
#include "kernels/layer_ops.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/float_types.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd/activation.h"

namespace fovea::kernels {
namespace cpu {
namespace {

using Activate = void (*)(const ActivatedRow&);

Activate kernel_of(Activation activation) {
  const Isa isa = best_isa();
  switch (activation) {
    case Activation::silu:
      return FOVEA_FOR_ISA(isa, activate_silu);
    case Activation::gelu_tanh:
      return FOVEA_FOR_ISA(isa, activate_gelu);
    case Activation::clamped_swiglu:
      return FOVEA_FOR_ISA(isa, activate_swiglu);
  }
  fail(ErrorCode::invalid_argument, "activation is {}, which no kernel computes",
       static_cast<int>(activation));
}

}  // namespace
}  // namespace cpu

namespace {

using cpu::parallel_ranges;

// Elements that are worth waking a thread for.
constexpr int64_t kGrain = 8192;

int64_t row_grain(int64_t elements_per_row) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_per_row));
}

float* head(const HeadView& view, int64_t row, int64_t head_index) {
  return view.data + row * view.row_stride + head_index * view.head_stride;
}

// Calls body(row, head) for all heads of all rows.
template <typename Body>
void for_heads(ThreadPool& threads, int64_t rows, int32_t heads, int32_t dim, const Body& body) {
  parallel_ranges(threads, rows * heads, row_grain(dim), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) body(item / heads, item % heads);
  });
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float silu(float x) { return x / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Sums the squares of value(0), value(1), ... in eight interleaved chains: the order is fixed, and
// each chain of additions is short.
template <typename Value>
float sum_of_squares(int32_t dim, const Value& value) {
  float sums[8] = {};
  int32_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    for (int32_t lane = 0; lane < 8; ++lane) {
      const float x = value(i + lane);
      sums[lane] += x * x;
    }
  }
  for (; i < dim; ++i) sums[i % 8] += value(i) * value(i);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace

void rms_norm(const RmsNormParams& params, ThreadPool& threads) {
  const float plus = params.weight_plus_one ? 1.0f : 0.0f;
  for_heads(threads, params.rows, params.heads, params.dim, [&](int64_t row, int64_t h) {
    const float* x = head(params.x, row, h);
    float* out = head(params.out, row, h);
    const float* gate = params.gate.data ? head(params.gate, row, h) : nullptr;
    const bool gates_first = params.gate_function == NormGate::silu_before;
    if (gate && gates_first) {
      for (int32_t i = 0; i < params.dim; ++i) out[i] = x[i] * silu(gate[i]);
      x = out;
    }
    const float squares = sum_of_squares(params.dim, [&](int32_t i) { return x[i]; });
    const float mean = squares / static_cast<float>(params.dim);
    const float inverse = 1.0f / std::sqrt(mean + params.epsilon);
    if (params.weight) {
      const float* weight = params.weight + h * params.weight_head_stride;
      for (int32_t i = 0; i < params.dim; ++i) out[i] = x[i] * inverse * (plus + weight[i]);
    } else {
      for (int32_t i = 0; i < params.dim; ++i) out[i] = x[i] * inverse;
    }
    if (gate && !gates_first) {
      const bool is_silu = params.gate_function == NormGate::silu;
      for (int32_t i = 0; i < params.dim; ++i) out[i] *= is_silu ? silu(gate[i]) : sigmoid(gate[i]);
    }
  });
}

namespace {

// Calls body(row, value) for all rows, where value(i) is the value of the row that is normed.
template <typename Body>
void for_divided_rows(const DividedNormParams& params, ThreadPool& threads, const Body& body) {
  for_heads(threads, params.rows, 1, params.dim, [&](int64_t row, int64_t) {
    const float* const x = params.x + row * params.x_row_stride;
    if (params.gate == nullptr) return body(row, [&](int32_t i) { return x[i]; });
    const float* const gate = params.gate + row * params.gate_row_stride;
    body(row, [&](int32_t i) { return x[i] * silu(gate[i]); });
  });
}

}  // namespace

void divided_norm_squares(const DividedNormParams& params, ThreadPool& threads) {
  for_divided_rows(params, threads, [&](int64_t row, const auto& value) {
    params.squares[row] = sum_of_squares(params.dim, value);
  });
}

void divided_norm_scale(const DividedNormParams& params, ThreadPool& threads) {
  const float plus = params.weight_plus_one ? 1.0f : 0.0f;
  const float count = static_cast<float>(params.dim) * static_cast<float>(params.parts);
  for_divided_rows(params, threads, [&](int64_t row, const auto& value) {
    const float inverse = 1.0f / std::sqrt(params.squares[row] / count + params.epsilon);
    float* const out = params.out + row * params.out_row_stride;
    for (int32_t i = 0; i < params.dim; ++i) {
      out[i] = value(i) * inverse * (plus + params.weight[i]);
    }
  });
}

void gated_activation(const GatedActivationParams& params, ThreadPool& threads) {
  const cpu::Activate activate = cpu::kernel_of(params.activation);
  parallel_ranges(threads, params.rows, row_grain(params.dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      activate({.gate = params.gate + row * params.in_row_stride,
                .up = params.up + row * params.in_row_stride,
                .out = params.out + row * params.out_row_stride,
                .dim = params.dim,
                .step = params.in_step,
                .alpha = params.bounds.alpha,
                .limit = params.bounds.limit});
    }
  });
}

void sigmoid_gate(const SigmoidGateParams& params, ThreadPool& threads) {
  check_argument(params.gate_dim == params.dim || params.gate_dim == 1,
                 "gate_dim is {}, must be dim ({}) or 1", params.gate_dim, params.dim);
  for_heads(threads, params.rows, params.heads, params.dim, [&](int64_t row, int64_t h) {
    float* x = head(params.x, row, h);
    const float* gate = head(params.gate, row, h);
    if (params.gate_dim == 1) {
      const float factor = sigmoid(gate[0]);
      for (int32_t i = 0; i < params.dim; ++i) x[i] *= factor;
    } else {
      for (int32_t i = 0; i < params.dim; ++i) x[i] *= sigmoid(gate[i]);
    }
  });
}

void delta_gates(const DeltaGateParams& params, ThreadPool& threads) {
  parallel_ranges(threads, params.rows, row_grain(int64_t{4} * params.heads),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      const float* a = params.a + row * params.a_row_stride;
                      const float* b = params.b + row * params.b_row_stride;
                      for (int64_t h = 0; h < params.heads; ++h) {
                        params.log_decay[row * params.heads + h] =
                            -std::exp(params.a_log[h]) * softplus(a[h] + params.dt_bias[h]);
                        params.beta[row * params.heads + h] = sigmoid(b[h]);
                      }
                    }
                  });
}

void delta_inputs(const DeltaInputsParams& params, ThreadPool& threads) {
  const int64_t key_dim = params.key_dim, keys = params.key_heads * key_dim;
  const int64_t per_key = params.value_heads / params.key_heads;
  const int64_t value_dim = per_key * params.value_dim, values = params.key_heads * value_dim;
  const int64_t heads = params.value_heads;
  parallel_ranges(threads, params.rows, row_grain(2 * (keys + values)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      const float* from = params.qkvz + row * 2 * (keys + values);
                      const float* from_ba = params.ba + row * 2 * heads;
                      float* const q = params.mixed + row * (2 * keys + values);
                      const auto next = [](const float*& source, int64_t count, float* to) {
                        std::copy_n(source, count, to);
                        source += count;
                      };
                      for (int64_t head = 0; head < params.key_heads; ++head) {
                        next(from, key_dim, q + head * key_dim);
                        next(from, key_dim, q + keys + head * key_dim);
                        next(from, value_dim, q + 2 * keys + head * value_dim);
                        next(from, value_dim, params.z + row * values + head * value_dim);
                        next(from_ba, per_key, params.beta + row * heads + head * per_key);
                        next(from_ba, per_key, params.log_decay + row * heads + head * per_key);
                      }
                    }
                  });
  DeltaGateParams gates;
  gates.a = params.log_decay;
  gates.b = params.beta;
  gates.a_row_stride = gates.b_row_stride = heads;
  gates.a_log = params.a_log;
  gates.dt_bias = params.dt_bias;
  gates.log_decay = params.log_decay;
  gates.beta = params.beta;
  gates.rows = params.rows;
  gates.heads = params.value_heads;
  delta_gates(gates, threads);
}

void mamba2_inputs(const Mamba2InputsParams& params, ThreadPool& threads) {
  const int64_t values = params.values, conv_dim = params.conv_dim, heads = params.heads;
  const int64_t width = values + conv_dim + heads;
  parallel_ranges(threads, params.rows, row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = params.projected + row * width;
      std::copy_n(from, values, params.z + row * values);
      std::copy_n(from + values, conv_dim, params.mixed + row * conv_dim);
      const float* dt = from + values + conv_dim;
      for (int64_t h = 0; h < heads; ++h) {
        const float step =
            std::clamp(softplus(dt[h] + params.dt_bias[h]), params.dt_min, params.dt_max);
        params.dt[row * heads + h] = step;
        params.log_decay[row * heads + h] = -std::exp(params.a_log[h]) * step;
      }
    }
  });
}

void kda_gates(const KdaGatesParams& params, ThreadPool& threads) {
  const int64_t width = int64_t{params.heads} * params.key_dim;
  parallel_ranges(threads, params.rows, row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* decays = params.log_decay + row * width;
      float* beta = params.beta + row * params.heads;
      for (int64_t h = 0; h < params.heads; ++h) {
        const float rate = -std::exp(params.a_log[h]);
        for (int64_t i = h * params.key_dim; i < (h + 1) * params.key_dim; ++i) {
          decays[i] = rate * softplus(decays[i] + params.dt_bias[i]);
        }
        beta[h] = sigmoid(beta[h]);
      }
    }
  });
}

void silu_gate(const SiluGateParams& params, ThreadPool& threads) {
  parallel_ranges(threads, params.rows, row_grain(params.dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = params.x + row * params.x_row_stride;
      float* out = params.out + row * params.out_row_stride;
      if (params.gate == nullptr) {
        std::copy_n(x, params.dim, out);
        continue;
      }
      const float* gate = params.gate + row * params.gate_row_stride;
      if (params.plain) {
        for (int32_t i = 0; i < params.dim; ++i) out[i] = x[i] * gate[i];
      } else {
        for (int32_t i = 0; i < params.dim; ++i) out[i] = x[i] * silu(gate[i]);
      }
    }
  });
}

void softplus(float* x, int64_t count, ThreadPool& threads) {
  parallel_ranges(threads, count, kGrain / 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] = softplus(x[i]);
  });
}

void add(float* x, const float* y, float factor, int64_t count, ThreadPool& threads) {
  parallel_ranges(threads, count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] += factor * y[i];
  });
}

void soft_cap(float* x, float cap, int64_t count, ThreadPool& threads) {
  parallel_ranges(threads, count, kGrain / 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] = cap * std::tanh(x[i] / cap);
  });
}

void scale_rows(const ScaleRowsParams& params, ThreadPool& threads) {
  for_heads(threads, params.rows, params.heads, params.dim, [&](int64_t row, int64_t h) {
    const float steps =
        std::floor((static_cast<float>(params.positions[row]) + 1) / params.scale.floor_scale);
    const float factor = std::log1p(steps) * params.scale.factor + 1;
    float* x = head(params.x, row, h);
    for (int32_t i = 0; i < params.dim; ++i) x[i] *= factor;
  });
}

void embedding(const EmbeddingParams& params, ThreadPool& threads) {
  check_argument(
      params.dtype == DType::f32 || params.dtype == DType::bf16 || params.dtype == DType::f16,
      "dtype of the embedding table is {}, must be fp32, bf16 or fp16", dtype_name(params.dtype));
  const auto row_bytes = static_cast<int64_t>(dtype_bytes(params.dtype)) * params.dim;
  parallel_ranges(threads, params.rows, row_grain(params.dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t id = params.ids[row];
      check_argument(id >= 0 && id < params.table_rows, "ids[{}] is {}, must be in [0, {})", row,
                     id, params.table_rows);
      const char* source = static_cast<const char*>(params.table) + id * row_bytes;
      float* out = params.out + row * params.dim;
      for (int32_t i = 0; i < params.dim; ++i) {
        out[i] = load_float(source, params.dtype, i) * params.factor;
      }
    }
  });
}

void gather_rows(const ExpertRowsParams& params, ThreadPool& threads) {
  parallel_ranges(threads, params.rows, row_grain(params.dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = params.x + params.index[row] * params.x_stride;
      float* out = params.out + row * params.out_stride;
      const float weight = params.weight ? params.weight[row] : 1.0f;
      for (int32_t i = 0; i < params.dim; ++i) out[i] = weight * x[i];
    }
  });
}

void scatter_add_rows(const ExpertRowsParams& params, ThreadPool& threads) {
  parallel_ranges(threads, params.rows, row_grain(params.dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = params.x + row * params.x_stride;
      float* out = params.out + params.index[row] * params.out_stride;
      const float weight = params.weight ? params.weight[row] : 1.0f;
      for (int32_t i = 0; i < params.dim; ++i) out[i] += weight * x[i];
    }
  });
}

}  // namespace fovea::kernels
