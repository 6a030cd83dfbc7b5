// SPDX-License-Identifier: Apache-2.0
#include "support/linear_case.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <type_traits>

#include "core/float_types.h"

namespace fovea::test {
namespace {

std::vector<float> normal(std::mt19937& random, size_t size, float deviation = 1) {
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = distribution(random);
  return values;
}

std::vector<float> uniform(std::mt19937& random, size_t size, float low, float high) {
  std::uniform_real_distribution<float> distribution(low, high);
  std::vector<float> values(size);
  for (float& value : values) value = distribution(random);
  return values;
}

// Returns the input of the recurrence: convolution and SiLU of the whole sequence, or the input.
template <typename Real>
std::vector<Real> convolved(const LinearCase& test, const LinearData& data,
                            const LinearSequence& sequence) {
  const int64_t dim = test.spec.linear.conv_dim();
  const int64_t width = test.spec.linear.conv_width;
  std::vector<Real> y(sequence.mixed.begin(), sequence.mixed.end());
  if (width == 0) return y;
  const auto length = static_cast<int64_t>(sequence.mixed.size()) / dim;
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t c = 0; c < dim; ++c) {
      Real sum = test.conv_bias ? data.conv_bias[c] : Real{0};
      for (int64_t back = 0; back < width && back <= t; ++back) {
        sum += static_cast<Real>(data.conv_weight[c * width + width - 1 - back]) *
               static_cast<Real>(sequence.mixed[(t - back) * dim + c]);
      }
      y[t * dim + c] = sum / (1 + std::exp(-sum));
    }
  }
  return y;
}

template <typename Real>
class Recurrence {
 public:
  Recurrence(const LinearCase& test, const LinearData& data, const LinearSequence& sequence)
      : spec_(test.spec),
        test_(test),
        data_(data),
        sequence_(sequence),
        input_(convolved<Real>(test, data, sequence)),
        length_(static_cast<int64_t>(input_.size()) / spec_.linear.conv_dim()) {}

  Expected run() {
    out_.resize(static_cast<size_t>(length_ * spec_.linear.value_heads * spec_.linear.value_dim));
    for (int32_t head = 0; head < spec_.linear.value_heads; ++head) {
      const bool rounds = std::is_same_v<Real, float> &&
                          (spec_.q_dtype == DType::bf16 || test_.state_dtype != DType::f32);
      if (spec_.kind == AttentionKind::mamba2) {
        rounds ? stored_mamba2(head) : mamba2(head);
      } else {
        rounds ? rounded_delta_net(head) : gated_delta_net(head);
      }
    }
    return {out_, {}};
  }

 private:
  // `width` values of one token, from channel `begin` on.
  std::vector<Real> part(int64_t token, int64_t begin, int32_t width) const {
    const auto from = input_.begin() + token * spec_.linear.conv_dim() + begin;
    return {from, from + width};
  }

  static Real dot(const std::vector<Real>& a, const std::vector<Real>& b) {
    Real sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }

  std::vector<Real> normalised(std::vector<Real> vector) const {
    if (!test_.l2_normalise) return vector;
    const Real norm = std::sqrt(dot(vector, vector) + static_cast<Real>(1e-6));
    for (Real& x : vector) x /= norm;
    return vector;
  }

  double& out(int64_t token, int32_t head, int32_t d) {
    return out_[(token * spec_.linear.value_heads + head) * spec_.linear.value_dim + d];
  }

  // S <- alpha S (I - beta k k^T) + beta v k^T with the matrix written out.
  void gated_delta_net(int32_t head) {
    const int32_t keys = spec_.linear.key_dim;
    const int32_t values = spec_.linear.value_dim;
    const int64_t all_keys = int64_t{spec_.linear.key_heads} * keys;
    const int64_t key_head = head / (spec_.linear.value_heads / spec_.linear.key_heads);
    std::vector<Real> state(static_cast<size_t>(values * keys), 0);
    for (int64_t t = 0; t < length_; ++t) {
      const auto q = normalised(part(t, key_head * keys, keys));
      const auto k = normalised(part(t, all_keys + key_head * keys, keys));
      const auto v = part(t, 2 * all_keys + int64_t{head} * values, values);
      const Real alpha =
          std::exp(static_cast<Real>(sequence_.log_decay[t * spec_.linear.value_heads + head]));
      const Real beta = sequence_.beta[t * spec_.linear.value_heads + head];
      std::vector<Real> next(state.size(), 0);
      for (int32_t i = 0; i < values; ++i) {
        for (int32_t j = 0; j < keys; ++j) {
          Real sum = 0;
          for (int32_t m = 0; m < keys; ++m) {
            const Real projector = (m == j ? Real{1} : Real{0}) - beta * k[m] * k[j];
            sum += state[i * keys + m] * projector;
          }
          next[i * keys + j] = alpha * sum + beta * v[i] * k[j];
        }
      }
      state = next;
      for (int32_t i = 0; i < values; ++i) {
        const std::vector<Real> row(state.begin() + i * keys, state.begin() + (i + 1) * keys);
        out(t, head, i) = static_cast<double>(dot(row, q) / std::sqrt(static_cast<Real>(keys)));
      }
    }
  }

  // Rounds operands of products to the queries' type.
  Real rounded(Real x) const { return through(spec_.q_dtype, x); }
  // Rounds a state as it is stored after a token.
  Real stored(Real x) const { return through(test_.state_dtype, x); }
  static Real through(DType dtype, Real x) {
    float bits = 0;
    store_float(&bits, dtype, 0, static_cast<float>(x));
    return load_float(&bits, dtype, 0);
  }

  std::vector<Real> rounded_part(int64_t token, int64_t begin, int32_t width) const {
    std::vector<Real> row = part(token, begin, width);
    for (Real& x : row) x = rounded(x);
    return row;
  }

  // By the definition, with operands of products and stored states rounded.
  void rounded_delta_net(int32_t head) {
    const int32_t keys = spec_.linear.key_dim, values = spec_.linear.value_dim;
    const int64_t all_keys = int64_t{spec_.linear.key_heads} * keys;
    const int64_t key_head = head / (spec_.linear.value_heads / spec_.linear.key_heads);
    std::vector<Real> state(static_cast<size_t>(values * keys), 0);
    for (int64_t t = 0; t < length_; ++t) {
      const auto q = normalised(rounded_part(t, key_head * keys, keys));
      const auto k = normalised(rounded_part(t, all_keys + key_head * keys, keys));
      const auto v = rounded_part(t, 2 * all_keys + int64_t{head} * values, values);
      const int64_t gate = t * spec_.linear.value_heads + head;
      const Real alpha = std::exp(static_cast<Real>(sequence_.log_decay[gate]));
      for (int32_t i = 0; i < values; ++i) {
        Real* const row = &state[static_cast<size_t>(i) * keys];
        Real recalled = 0, read = 0;
        for (int32_t j = 0; j < keys; ++j) recalled += rounded(alpha * row[j]) * k[j];
        const Real change = rounded(sequence_.beta[gate] * (v[i] - recalled));
        for (int32_t j = 0; j < keys; ++j) {
          const Real next = alpha * row[j] + change * k[j];
          read += rounded(next) * q[j];
          row[j] = stored(next);
        }
        out(t, head, i) = static_cast<double>(read / std::sqrt(static_cast<Real>(keys)));
      }
    }
  }

  // h_t = e^a_t h_t-1 + dt_t x_t B_t^T, rounded as it is stored; y_t = h_t C_t + D x_t.
  void stored_mamba2(int32_t head) {
    const int32_t width = spec_.linear.value_dim, states = spec_.linear.key_dim;
    const int64_t group = head / (spec_.linear.value_heads / spec_.linear.key_heads);
    const int64_t b_at = int64_t{spec_.linear.value_heads} * width + group * states;
    const int64_t c_at = b_at + int64_t{spec_.linear.key_heads} * states;
    std::vector<Real> state(static_cast<size_t>(width * states), 0);
    for (int64_t t = 0; t < length_; ++t) {
      const auto x = rounded_part(t, int64_t{head} * width, width);
      const auto b = rounded_part(t, b_at, states), c = rounded_part(t, c_at, states);
      const int64_t gate = t * spec_.linear.value_heads + head;
      const Real decay = std::exp(static_cast<Real>(sequence_.log_decay[gate]));
      for (int32_t i = 0; i < width; ++i) {
        Real y = test_.skip ? static_cast<Real>(data_.skip[head]) * x[i] : Real{0};
        for (int32_t j = 0; j < states; ++j) {
          Real& h = state[static_cast<size_t>(i * states + j)];
          const Real next = decay * h + sequence_.beta[gate] * x[i] * b[j];
          y += rounded(next) * c[j];
          h = stored(next);
        }
        out(t, head, i) = static_cast<double>(y);
      }
    }
  }

  // y_t = sum over s <= t of e^(a_s+1 + ... + a_t) dt_s (C_t . B_s) x_s, plus D x_t.
  void mamba2(int32_t head) {
    const int32_t width = spec_.linear.value_dim;
    const int32_t states = spec_.linear.key_dim;
    const int64_t all_x = int64_t{spec_.linear.value_heads} * width;
    const int64_t group = head / (spec_.linear.value_heads / spec_.linear.key_heads);
    const int64_t b_at = all_x + group * states;
    const int64_t c_at = b_at + int64_t{spec_.linear.key_heads} * states;
    for (int64_t t = 0; t < length_; ++t) {
      const auto c = part(t, c_at, states);
      std::vector<Real> y = part(t, int64_t{head} * width, width);
      for (Real& x : y) x *= test_.skip ? static_cast<Real>(data_.skip[head]) : Real{0};
      Real log_decay = 0;
      for (int64_t s = t; s >= 0; --s) {
        const auto x = part(s, int64_t{head} * width, width);
        const Real dt = sequence_.beta[s * spec_.linear.value_heads + head];
        const Real weight = std::exp(log_decay) * dt * dot(c, part(s, b_at, states));
        for (int32_t d = 0; d < width; ++d) y[d] += weight * x[d];
        log_decay += static_cast<Real>(sequence_.log_decay[s * spec_.linear.value_heads + head]);
      }
      for (int32_t d = 0; d < width; ++d) out(t, head, d) = static_cast<double>(y[d]);
    }
  }

  const AttentionSpec& spec_;
  const LinearCase& test_;
  const LinearData& data_;
  const LinearSequence& sequence_;
  const std::vector<Real> input_;
  const int64_t length_;
  std::vector<double> out_;
};

LinearCase linear_case(std::string name, AttentionKind kind, int32_t q_heads, int32_t kv_heads) {
  LinearCase test;
  test.name = std::move(name);
  test.spec.kind = kind;
  test.spec.linear.key_heads = q_heads;
  test.spec.linear.value_heads = kv_heads;
  test.spec.linear.key_dim = 32;
  test.spec.linear.value_dim = 16;
  test.spec.linear.conv_width = 4;
  test.lengths = {1, 2, 3, 5, 70, 130, 16};
  return test;
}

}  // namespace

std::vector<LinearCase> linear_cases() {
  std::vector<LinearCase> cases;
  LinearCase test = linear_case("delta", AttentionKind::gated_delta_net, 2, 4);
  cases.push_back(test);
  test.name = "delta_plain";
  test.conv_bias = test.l2_normalise = false;
  test.spec.linear.conv_width = 0;
  test.spec.linear.value_heads = 2;
  cases.push_back(test);
  test = linear_case("delta_odd_dims", AttentionKind::gated_delta_net, 1, 3);
  test.spec.linear.key_dim = 24;
  test.spec.linear.value_dim = 20;
  test.spec.linear.conv_width = 2;
  cases.push_back(test);
  test = linear_case("delta_128", AttentionKind::gated_delta_net, 1, 2);
  test.spec.linear.key_dim = test.spec.linear.value_dim = 128;
  test.lengths = {1, 9, 2};
  cases.push_back(test);

  // 64 tokens and more may be computed in chunks.
  test.name = "delta_rounded";
  test.spec.q_dtype = DType::bf16;
  test.lengths = {130, 64, 1, 63};
  cases.push_back(test);
  test.name = "delta_rounded_f16_states";
  test.state_dtype = DType::f16;
  cases.push_back(test);

  test = linear_case("mamba2", AttentionKind::mamba2, 1, 4);
  cases.push_back(test);
  test.name = "mamba2_groups";
  test.spec.linear.key_heads = 2;
  test.skip = test.conv_bias = false;
  test.spec.linear.value_dim = 64;
  cases.push_back(test);
  test.name = "mamba2_no_conv";
  test.spec.linear.conv_width = 0;
  cases.push_back(test);
  test = linear_case("mamba2_128", AttentionKind::mamba2, 1, 2);
  test.spec.linear.key_dim = 128;
  test.lengths = {1, 9, 2};
  cases.push_back(test);
  test.name = "mamba2_rounded";
  test.spec.q_dtype = DType::bf16;
  test.spec.linear.value_dim = 128;
  test.lengths = {130, 64, 1, 63};
  cases.push_back(test);
  test.name = "mamba2_rounded_bf16_states";
  test.state_dtype = DType::bf16;
  test.spec.linear.value_dim = 64;
  test.spec.linear.value_heads = 3;
  test.skip = false;
  cases.push_back(test);

  // States of 16 bits.
  test = linear_case("delta_bf16_states", AttentionKind::gated_delta_net, 1, 3);
  test.state_dtype = DType::bf16;
  cases.push_back(test);
  test.name = "delta_f16_states";
  test.state_dtype = DType::f16;
  test.spec.linear.key_dim = 24;
  test.spec.linear.value_dim = 20;
  cases.push_back(test);
  test = linear_case("mamba2_bf16_states", AttentionKind::mamba2, 1, 2);
  test.state_dtype = DType::bf16;
  cases.push_back(test);

  // Longer than the chunks of other kernels: 64 tokens of the delta rule, 256 of mamba2.
  for (const AttentionKind kind : {AttentionKind::gated_delta_net, AttentionKind::mamba2}) {
    const bool delta = kind == AttentionKind::gated_delta_net;
    test = linear_case(delta ? "delta_long" : "mamba2_long", kind, 1, 2);
    test.lengths = {257, 600, 1};
    cases.push_back(test);
  }
  return cases;
}

StateCacheSpec state_spec(const LinearCase& test) {
  StateCacheSpec state;
  state.layers = 2;
  state.conv_dim = test.spec.linear.conv_dim();
  state.conv_width = std::max(1, test.spec.linear.conv_width);
  state.heads = test.spec.linear.value_heads;
  state.rows = test.spec.linear.value_dim;
  state.columns = test.spec.linear.key_dim;
  state.dtype = test.state_dtype;
  return state;
}

LinearData make_data(const LinearCase& test) {
  std::mt19937 random(test.seed);
  LinearData data;
  const auto heads = static_cast<size_t>(test.spec.linear.value_heads);
  const auto dim = static_cast<size_t>(test.spec.linear.conv_dim());
  for (int32_t length : test.lengths) {
    LinearSequence sequence;
    const auto tokens = static_cast<size_t>(length);
    // Without normalised keys the delta rule diverges unless |k| is small.
    const bool small = test.spec.kind == AttentionKind::gated_delta_net && !test.l2_normalise;
    sequence.mixed = normal(random, tokens * dim, small ? 0.15f : 1.0f);
    sequence.log_decay = uniform(random, tokens * heads, -0.5f, 0.0f);
    sequence.beta = uniform(random, tokens * heads, 0.0f, 1.0f);
    data.sequences.push_back(std::move(sequence));
  }
  data.conv_weight = normal(random, dim * static_cast<size_t>(test.spec.linear.conv_width), 0.5f);
  data.conv_bias = normal(random, dim, 0.5f);
  data.skip = normal(random, heads);
  return data;
}

OracleResult oracle(const LinearCase& test, const LinearData& data, size_t sequence) {
  const LinearSequence& tokens = data.sequences[sequence];
  return {.exact = Recurrence<double>(test, data, tokens).run(),
          .plain = Recurrence<float>(test, data, tokens).run(),
          .rounded_keys = test.spec.q_dtype == DType::bf16 || test.state_dtype != DType::f32};
}

}  // namespace fovea::test
