// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "core/check.h"
#include "core/float_types.h"
#include "kernels/cpu/parallel.h"
#include "kernels/kv_write.h"
#include "kernels/layer_ops.h"

namespace fovea::kernels {
namespace {

// Returns the share of the unscaled frequency for each pair of dims: 1 for high frequencies, 0 for
// low ones.
std::vector<double> yarn_blend(const RopeSpec& spec) {
  const int32_t pairs = spec.rotary_dim / 2;
  // The (fractional) pair that rotates `rotations` times over the original context.
  const auto pair_of = [&](double rotations) {
    return spec.rotary_dim *
           std::log(spec.original_max_positions / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(spec.theta));
  };
  double low = pair_of(spec.beta_fast);
  double high = pair_of(spec.beta_slow);
  if (spec.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, spec.rotary_dim - 1.0);
  if (low == high) high += 0.001;
  std::vector<double> blend(static_cast<size_t>(pairs));
  for (int32_t i = 0; i < pairs; ++i) {
    blend[static_cast<size_t>(i)] = 1 - std::clamp((i - low) / (high - low), 0.0, 1.0);
  }
  return blend;
}

double llama3_frequency(const RopeSpec& spec, double frequency) {
  const double turns = spec.original_max_positions * frequency / (2 * std::numbers::pi);
  if (turns < spec.low_freq_factor) return frequency / spec.factor;
  if (turns > spec.high_freq_factor) return frequency;
  const double smooth =
      (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor);
  return (1 - smooth) * frequency / spec.factor + smooth * frequency;
}

std::vector<float> frequencies(const RopeSpec& spec, int32_t max_positions) {
  const int32_t pairs = spec.rotary_dim / 2;
  const std::vector<double>& factors =
      max_positions > spec.original_max_positions ? spec.long_factors : spec.short_factors;
  std::vector<double> blend;
  if (spec.scaling == RopeScaling::yarn) blend = yarn_blend(spec);
  std::vector<float> result(static_cast<size_t>(pairs));
  for (int32_t i = 0; i < pairs; ++i) {
    const auto at = static_cast<size_t>(i);
    double frequency = 1 / std::pow(spec.theta, 2.0 * i / spec.rotary_dim);
    switch (spec.scaling) {
      case RopeScaling::none:
      case RopeScaling::dynamic:
        break;
      case RopeScaling::linear:
        frequency /= spec.factor;
        break;
      case RopeScaling::llama3:
        frequency = llama3_frequency(spec, frequency);
        break;
      case RopeScaling::yarn:
        frequency = frequency / spec.factor * (1 - blend[at]) + frequency * blend[at];
        break;
      case RopeScaling::longrope:
        frequency /= factors[at];
        break;
    }
    result[at] = static_cast<float>(frequency);
  }
  return result;
}

double attention_factor(const RopeSpec& spec) {
  const bool is_longrope = spec.scaling == RopeScaling::longrope;
  if (spec.scaling != RopeScaling::yarn && !is_longrope) return 1;
  if (spec.attention_factor > 0) return spec.attention_factor;
  if (is_longrope) {
    if (spec.factor <= 1) return 1;
    return std::sqrt(1 + std::log(spec.factor) / std::log(spec.original_max_positions));
  }
  if (spec.mscale > 0 && spec.mscale_all_dim > 0) {
    return yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim);
  }
  return yarn_mscale(spec.factor, 1);
}

// A norm of a head whose factor has been found.
class FoundNorm {
 public:
  FoundNorm(const HeadNorm& norm, const char* head, DType dtype, int64_t dim) : norm_(norm) {
    if (norm.weight == nullptr) return;
    double squares = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const double value = load_float(head, dtype, i);
      squares += value * value;
    }
    factor_ = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(dim) + norm.epsilon));
  }
  float operator()(float value, int64_t at) const {
    if (norm_.weight == nullptr) return value;
    return value * (factor_ * (norm_.weight[at] + (norm_.plus_one ? 1.0f : 0.0f)));
  }

 private:
  const HeadNorm& norm_;
  float factor_ = 1;
};

void rotate(float& a, float& b, float cos, float sin) {
  const float first = a * cos - b * sin;
  b = b * cos + a * sin;
  a = first;
}

}  // namespace

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

RopeTable make_rope_table(const RopeSpec& spec, int32_t max_positions) {
  check_argument(spec.rotary_dim > 0 && spec.rotary_dim % 2 == 0,
                 "rotary_dim is {}, must be positive and even", spec.rotary_dim);
  check_argument(max_positions > 0, "max_positions is {}, must be positive", max_positions);
  check_argument(spec.theta > 1, "rope theta is {}, must be above 1", spec.theta);
  check_argument(spec.factor > 0, "rope factor is {}, must be positive", spec.factor);
  if (spec.scaling == RopeScaling::llama3 || spec.scaling == RopeScaling::yarn ||
      spec.scaling == RopeScaling::longrope) {
    check_argument(spec.original_max_positions > 0,
                   "original_max_positions is {}, must be positive", spec.original_max_positions);
  }
  if (spec.scaling == RopeScaling::llama3) {
    check_argument(spec.high_freq_factor > spec.low_freq_factor,
                   "high_freq_factor is {}, must be above low_freq_factor ({})",
                   spec.high_freq_factor, spec.low_freq_factor);
  }
  if (spec.scaling == RopeScaling::longrope) {
    const auto pairs = static_cast<size_t>(spec.rotary_dim) / 2;
    check_argument(spec.short_factors.size() == pairs && spec.long_factors.size() == pairs,
                   "there are {} short_factors and {} long_factors, must be {}",
                   spec.short_factors.size(), spec.long_factors.size(), pairs);
  }
  const std::vector<float> frequency = frequencies(spec, max_positions);
  const auto factor = static_cast<float>(attention_factor(spec));
  RopeTable table;
  table.max_positions = max_positions;
  table.rotary_dim = spec.rotary_dim;
  table.cos.reserve(frequency.size() * static_cast<size_t>(max_positions));
  table.sin.reserve(frequency.size() * static_cast<size_t>(max_positions));
  for (int32_t position = 0; position < max_positions; ++position) {
    for (const float f : frequency) {
      const float angle = f * static_cast<float>(position);
      table.cos.push_back(std::cos(angle) * factor);
      table.sin.push_back(std::sin(angle) * factor);
    }
  }
  return table;
}

void rope(const RopeParams& params, ThreadPool& threads) {
  const RopeTableView& table = params.table;
  const int64_t pairs = table.rotary_dim / 2;
  const bool split = params.layout == RopeLayout::half_split;
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, params.heads * pairs));
  cpu::parallel_ranges(threads, params.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t position = params.positions[row];
      check_argument(position >= 0 && position < table.max_positions,
                     "positions[{}] is {}, must be in [0, {})", row, position, table.max_positions);
      const float* cos = table.cos + position * pairs;
      const float* sin = table.sin + position * pairs;
      for (int64_t head = 0; head < params.heads; ++head) {
        float* x = params.x.data + row * params.x.row_stride + head * params.x.head_stride;
        if (split) {
          for (int64_t i = 0; i < pairs; ++i) rotate(x[i], x[i + pairs], cos[i], sin[i]);
        } else {
          for (int64_t i = 0; i < pairs; ++i) rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
        }
      }
    }
  });
}

void rotate_heads(const RotateHeadsParams& params, ThreadPool& threads) {
  const RotaryTensors& rotary = params.rotary;
  const DType dtype = params.from.dtype;
  const int64_t pairs = rotary.rotary_dim / 2;
  const int64_t rest = rotary.rotary_dim;
  const auto size = static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t first_step = rotary.interleaved ? 2 : 1;
  const int64_t second_at = rotary.interleaved ? 1 : pairs;
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, params.heads * pairs));
  cpu::parallel_ranges(threads, params.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t position = rotary.positions[token];
      check_argument(position >= 0 && position < rotary.max_positions,
                     "rotary.positions[{}] is {}, must be in [0, {})", token, position,
                     rotary.max_positions);
      for (int64_t head = 0; head < params.heads; ++head) {
        const char* from = row_address(params.from, token, head);
        char* to = row_address(params.to, token, head);
        const FoundNorm norm(params.norm, from, dtype, params.head_dim);
        for (int64_t pair = 0; pair < pairs; ++pair) {
          const int64_t at = pair * first_step;
          float a = norm(load_float(from, dtype, at), at);
          float b = norm(load_float(from, dtype, at + second_at), at + second_at);
          rotate(a, b, rotary.cos[position * pairs + pair], rotary.sin[position * pairs + pair]);
          store_float(to, dtype, at, a);
          store_float(to, dtype, at + second_at, b);
        }
        if (params.norm.weight != nullptr) {
          for (int64_t i = rest; i < params.head_dim; ++i) {
            store_float(to, dtype, i, norm(load_float(from, dtype, i), i));
          }
        } else if (from != to && rest < params.head_dim) {
          std::memcpy(to + rest * size, from + rest * size,
                      static_cast<size_t>((params.head_dim - rest) * size));
        }
      }
    }
  });
}

}  // namespace fovea::kernels
