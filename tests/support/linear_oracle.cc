// SPDX-License-Identifier: Apache-2.0
// The outputs of whole sequences of linear layers, by other formulas than the kernels.
#include <cmath>
#include <type_traits>

#include "core/float_types.h"
#include "support/linear_case.h"

namespace fovea::test {
namespace {

// Returns the input of the recurrence: convolution and SiLU of the whole sequence, or the input.
// mamba1: only the first channels are convolved.
template <typename Real>
std::vector<Real> convolved(const LinearCase& test, const LinearData& data,
                            const LinearSequence& sequence) {
  const int64_t dim = test.spec.linear.conv_dim();
  const int64_t width = test.spec.linear.conv_width;
  std::vector<Real> y(sequence.mixed.begin(), sequence.mixed.end());
  if (width == 0) return y;
  const auto length = static_cast<int64_t>(sequence.mixed.size()) / dim;
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t c = 0; c < conv_dim_of(test.spec); ++c) {
      Real sum = test.conv_bias ? data.conv_bias[c] : Real{0};
      for (int64_t back = 0; back < width && back <= t; ++back) {
        sum += static_cast<Real>(data.conv_weight[c * width + width - 1 - back]) *
               static_cast<Real>(sequence.mixed[(t - back) * dim + c]);
      }
      y[t * dim + c] = test.plain_conv ? sum : sum / (1 + std::exp(-sum));
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
    if (spec_.kind == AttentionKind::short_conv) return {{input_.begin(), input_.end()}, {}};
    out_.resize(static_cast<size_t>(length_ * spec_.linear.value_heads * spec_.linear.value_dim));
    const bool rounds = std::is_same_v<Real, float> &&
                        (spec_.q_dtype == DType::bf16 || test_.state_dtype != DType::f32);
    for (int32_t head = 0; head < spec_.linear.value_heads; ++head) {
      if (has_delta_rule(spec_.kind)) {
        rounds ? rounded_delta_rule(head) : delta_rule(head);
      } else if (spec_.kind == AttentionKind::mamba1 && !rounds) {
        sum_of_columns(head);
      } else {
        rounds ? stored_sum(head) : weighted_sum(head);
      }
    }
    return {out_, {}};
  }

 private:
  // The first channels of a head: of the vectors that its state takes and is read by, and of
  // values.
  struct Places {
    int64_t in, out, values;
  };
  Places places_of(int32_t head) const {
    const LinearSpec& linear = spec_.linear;
    const int64_t keys = int64_t{linear.key_heads} * linear.key_dim;
    const int64_t key = int64_t{head} / (linear.value_heads / linear.key_heads) * linear.key_dim;
    const int64_t value = int64_t{head} * linear.value_dim;
    if (!is_mamba()) return {keys + key, key, 2 * keys + value};
    const int64_t inputs = int64_t{linear.value_heads} * linear.value_dim;
    return {inputs + key, inputs + keys + key, value};
  }

  bool is_mamba() const {
    return spec_.kind == AttentionKind::mamba1 || spec_.kind == AttentionKind::mamba2;
  }
  int64_t gate(int64_t token, int32_t head) const {
    return token * spec_.linear.value_heads + head;
  }
  Real log_decay(int64_t token, int32_t head, int32_t column = 0) const {
    if (spec_.kind == AttentionKind::lightning) return data_.head_log_decay[head];
    if (spec_.kind == AttentionKind::mamba1) {
      return strength(token, head) * data_.a[head * spec_.linear.key_dim + column];
    }
    if (spec_.kind != AttentionKind::kda) return sequence_.log_decay[gate(token, head)];
    return sequence_.log_decay[gate(token, head) * spec_.linear.key_dim + column];
  }
  std::vector<Real> decays_of(int64_t token, int32_t head) const {
    std::vector<Real> decays(static_cast<size_t>(spec_.linear.key_dim));
    for (size_t j = 0; j < decays.size(); ++j) {
      decays[j] = std::exp(log_decay(token, head, static_cast<int32_t>(j)));
    }
    return decays;
  }
  Real strength(int64_t token, int32_t head) const {
    return spec_.kind == AttentionKind::lightning ? Real{1} : sequence_.beta[gate(token, head)];
  }
  Real skip(int32_t head) const {
    return is_mamba() && test_.skip ? static_cast<Real>(data_.skip[head]) : Real{0};
  }
  Real scale() const {
    return is_mamba() ? Real{1} : 1 / std::sqrt(static_cast<Real>(spec_.linear.key_dim));
  }

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
    return out_[gate(token, head) * spec_.linear.value_dim + d];
  }

  // S <- S D (I - beta k k^T) + beta v k^T with the matrix written out.
  void delta_rule(int32_t head) {
    const int32_t keys = spec_.linear.key_dim, values = spec_.linear.value_dim;
    const Places at = places_of(head);
    std::vector<Real> state(static_cast<size_t>(values * keys), 0);
    for (int64_t t = 0; t < length_; ++t) {
      const auto q = normalised(part(t, at.out, keys)), k = normalised(part(t, at.in, keys));
      const auto v = part(t, at.values, values), decays = decays_of(t, head);
      const Real beta = strength(t, head);
      std::vector<Real> next(state.size(), 0);
      for (int32_t i = 0; i < values; ++i) {
        for (int32_t j = 0; j < keys; ++j) {
          Real sum = 0;
          for (int32_t m = 0; m < keys; ++m) {
            const Real projector = (m == j ? Real{1} : Real{0}) - beta * k[m] * k[j];
            sum += decays[m] * state[i * keys + m] * projector;
          }
          next[i * keys + j] = sum + beta * v[i] * k[j];
        }
      }
      state = next;
      for (int32_t i = 0; i < values; ++i) {
        const std::vector<Real> row(state.begin() + i * keys, state.begin() + (i + 1) * keys);
        out(t, head, i) = static_cast<double>(dot(row, q) * scale());
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
  void rounded_delta_rule(int32_t head) {
    const int32_t keys = spec_.linear.key_dim, values = spec_.linear.value_dim;
    const Places at = places_of(head);
    std::vector<Real> state(static_cast<size_t>(values * keys), 0);
    for (int64_t t = 0; t < length_; ++t) {
      const auto q = normalised(rounded_part(t, at.out, keys));
      const auto k = normalised(rounded_part(t, at.in, keys));
      const auto v = rounded_part(t, at.values, values), decays = decays_of(t, head);
      for (int32_t i = 0; i < values; ++i) {
        Real* const row = &state[static_cast<size_t>(i) * keys];
        Real recalled = 0, read = 0;
        for (int32_t j = 0; j < keys; ++j) recalled += rounded(decays[j] * row[j]) * k[j];
        const Real change = rounded(strength(t, head) * (v[i] - recalled));
        for (int32_t j = 0; j < keys; ++j) {
          const Real next = decays[j] * row[j] + change * k[j];
          read += rounded(next) * q[j];
          row[j] = stored(next);
        }
        out(t, head, i) = static_cast<double>(read * scale());
      }
    }
  }

  // S <- decay S + strength v k^T, rounded as it is stored; out = scale S q + skip v.
  void stored_sum(int32_t head) {
    const int32_t keys = spec_.linear.key_dim, values = spec_.linear.value_dim;
    const Places at = places_of(head);
    std::vector<Real> state(static_cast<size_t>(values * keys), 0);
    for (int64_t t = 0; t < length_; ++t) {
      const auto v = rounded_part(t, at.values, values);
      const auto k = rounded_part(t, at.in, keys), q = rounded_part(t, at.out, keys);
      const auto decays = decays_of(t, head);
      for (int32_t i = 0; i < values; ++i) {
        Real read = 0;
        for (int32_t j = 0; j < keys; ++j) {
          Real& s = state[static_cast<size_t>(i * keys + j)];
          const Real next = decays[j] * s + strength(t, head) * v[i] * k[j];
          read += rounded(next) * q[j];
          s = stored(next);
        }
        out(t, head, i) = static_cast<double>(read * scale() + skip(head) * v[i]);
      }
    }
  }

  // out_t = scale * sum over s <= t of e^(a_s+1 + ... + a_t) strength_s (q_t . k_s) v_s, plus
  // skip v_t.
  void weighted_sum(int32_t head) {
    const int32_t keys = spec_.linear.key_dim, values = spec_.linear.value_dim;
    const Places at = places_of(head);
    for (int64_t t = 0; t < length_; ++t) {
      const auto q = part(t, at.out, keys);
      std::vector<Real> sums = part(t, at.values, values);
      for (Real& x : sums) x *= skip(head);
      Real total = 0;
      for (int64_t s = t; s >= 0; --s) {
        const auto v = part(s, at.values, values);
        const Real weight =
            scale() * std::exp(total) * strength(s, head) * dot(q, part(s, at.in, keys));
        for (int32_t d = 0; d < values; ++d) sums[d] += weight * v[d];
        total += log_decay(s, head);
      }
      for (int32_t d = 0; d < values; ++d) out(t, head, d) = static_cast<double>(sums[d]);
    }
  }

  // The same with a decay for each column, for heads of one value: out_t = sum over s <= t and j of
  // e^(a_s+1,j + ... + a_t,j) strength_s q_t,j k_s,j v_s, plus skip v_t.
  void sum_of_columns(int32_t head) {
    const int32_t keys = spec_.linear.key_dim;
    const Places at = places_of(head);
    for (int64_t t = 0; t < length_; ++t) {
      const auto q = part(t, at.out, keys);
      std::vector<Real> totals(static_cast<size_t>(keys), 0);
      Real sum = skip(head) * part(t, at.values, 1)[0];
      for (int64_t s = t; s >= 0; --s) {
        const auto k = part(s, at.in, keys);
        const Real v = part(s, at.values, 1)[0] * strength(s, head);
        for (int32_t j = 0; j < keys; ++j) {
          sum += std::exp(totals[j]) * q[j] * k[j] * v;
          totals[j] += log_decay(s, head, j);
        }
      }
      out(t, head, 0) = static_cast<double>(sum);
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

}  // namespace

OracleResult oracle(const LinearCase& test, const LinearData& data, size_t sequence) {
  const LinearSequence& tokens = data.sequences[sequence];
  return {.exact = Recurrence<double>(test, data, tokens).run(),
          .plain = Recurrence<float>(test, data, tokens).run(),
          .rounded_keys = test.spec.q_dtype == DType::bf16 || test.state_dtype != DType::f32};
}

}  // namespace fovea::test
