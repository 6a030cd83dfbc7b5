// SPDX-License-Identifier: Apache-2.0
// Batches of the prefill of gated delta net and of KDA, and one head of a request in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "kernels/cuda/sm90/chunk_common/launch.h"

namespace fovea::kernels::cuda {

inline constexpr int32_t kDim = kKeyDim;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Request {
  int32_t tokens;
  bool continues = false;  // from a state
  bool padding = false;    // slot -1
};

// Which requests are cut into segments, where multiprocessors are left for them.
enum class Cuts { none, of_long_ones, of_all };

struct Case {
  std::string name;
  int32_t key_heads, value_heads;
  std::vector<Request> requests;
  bool l2_normalise = true;
  float decay = 0.2f;  // ln(alpha) is in (-decay, 0]
  float beta = 1;      // beta is in [0, beta)
  int32_t min_tokens = 1;
  bool is_kda = false;
  Cuts cuts = Cuts::none;

  // Log decays of a token.
  int32_t decays() const { return value_heads * (is_kda ? kDim : 1); }
  // Returns whether results of a request are compared: of about 32, as fp64 takes its time.
  bool is_compared(size_t request) const { return request % (requests.size() / 32 + 1) == 0; }
};

// The inputs of a batch, and room for its results.
struct Batch {
  std::vector<int32_t> q_indptr{0}, kv_lens, slots;
  std::vector<uint16_t> q, k, v;
  std::vector<float> log_decay, beta, states;

  int32_t tokens() const { return q_indptr.back(); }
  int32_t requests() const { return static_cast<int32_t>(slots.size()); }
};

inline int64_t state_size(const Case& test) { return int64_t{test.value_heads} * kDim * kDim; }

// Tokens of padding are NaN, and so are the states of all slots that nobody continues.
inline Batch make_batch(const Case& test, uint32_t seed = 5) {
  Batch batch;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  const auto append = [&](std::vector<uint16_t>& to, int32_t heads, bool is_nan, float factor) {
    for (int32_t head = 0; head < heads; ++head) {
      float squares = 0;
      std::vector<float> row(kDim);
      for (float& x : row) {
        x = normal(random);
        squares += x * x;
      }
      const float scale = test.l2_normalise || factor != 1 ? factor : 0.75f / std::sqrt(squares);
      for (const float x : row) to.push_back(float_to_bf16(is_nan ? kNan : x * scale));
    }
  };
  int32_t slot = static_cast<int32_t>(test.requests.size());
  for (const Request& request : test.requests) {
    batch.q_indptr.push_back(batch.tokens() + request.tokens);
    batch.kv_lens.push_back(request.tokens + (request.continues ? 100 : 0));
    batch.slots.push_back(request.padding ? -1 : slot--);
    for (int32_t token = 0; token < request.tokens; ++token) {
      append(batch.q, test.key_heads, request.padding, 1);
      append(batch.k, test.key_heads, request.padding, 1);
      append(batch.v, test.value_heads, request.padding, 2);
      for (int32_t head = 0; head < test.value_heads; ++head) {
        for (int32_t i = 0; i < test.decays() / test.value_heads; ++i) {
          batch.log_decay.push_back(request.padding ? kNan : -test.decay * uniform(random));
        }
        batch.beta.push_back(request.padding ? kNan : test.beta * uniform(random));
      }
    }
  }
  batch.states.assign((test.requests.size() + 1) * static_cast<size_t>(state_size(test)), kNan);
  for (size_t i = 0; i < test.requests.size(); ++i) {
    if (!test.requests[i].continues || test.requests[i].padding) continue;
    for (int64_t n = 0; n < state_size(test); ++n) {
      batch.states[static_cast<size_t>(batch.slots[i] * state_size(test) + n)] = normal(random);
    }
  }
  return batch;
}

// Returns the batch with some of its requests, and with tokens [first, first + count) of them.
inline Batch part_of(const Case& test, const Batch& all, std::span<const size_t> requests,
                     int32_t first, int32_t count) {
  Batch part;
  part.states = all.states;
  for (const size_t i : requests) {
    const int32_t begin = all.q_indptr[i] + first;
    const int32_t end = std::min(begin + count, all.q_indptr[i + 1]);
    part.q_indptr.push_back(part.tokens() + end - begin);
    part.kv_lens.push_back(all.kv_lens[i] - (all.q_indptr[i + 1] - end));
    part.slots.push_back(all.slots[i]);
    const auto copy = [&](const auto& from, auto& to, int32_t width) {
      to.insert(to.end(), from.begin() + int64_t{begin} * width,
                from.begin() + int64_t{end} * width);
    };
    copy(all.q, part.q, test.key_heads * kDim);
    copy(all.k, part.k, test.key_heads * kDim);
    copy(all.v, part.v, test.value_heads * kDim);
    copy(all.log_decay, part.log_decay, test.decays());
    copy(all.beta, part.beta, test.value_heads);
  }
  return part;
}

inline bool in_chunks(const Case& test, int32_t tokens, bool padding) {
  return tokens > 0 && tokens >= test.min_tokens && !padding;
}

inline std::vector<StateSpan> spans_of(const Case& test, const Batch& batch) {
  std::vector<StateSpan> spans;
  for (size_t i = 0; i < batch.slots.size(); ++i) {
    const int32_t begin = batch.q_indptr[i], end = batch.q_indptr[i + 1];
    const bool chunked = in_chunks(test, end - begin, batch.slots[i] < 0);
    spans.push_back({begin, end, batch.slots[i], batch.kv_lens[i] <= end - begin, chunked});
  }
  return spans;
}

// One request and head in fp64, by the definition. With `rounds` it is the plain computation that
// rounds like the kernel: the state as an operand and new values to bf16.
struct HeadResult {
  std::vector<double> out, state;
};
inline HeadResult exact(const Case& test, const Batch& batch, size_t request, int32_t head,
                        bool rounds) {
  const auto rounded = [&](double x) {
    return rounds ? double{bf16_to_float(float_to_bf16(static_cast<float>(x)))} : x;
  };
  const int32_t key_head = head / (test.value_heads / test.key_heads);
  HeadResult result;
  result.state.assign(size_t{kDim} * kDim, 0);
  if (test.requests[request].continues) {
    const auto from = batch.states.begin() + batch.slots[request] * state_size(test) +
                      int64_t{head} * kDim * kDim;
    std::copy_n(from, kDim * kDim, result.state.begin());
  }
  const auto row_of = [&](const std::vector<uint16_t>& from, int32_t heads, int32_t at_head,
                          int32_t token, bool normalises) {
    std::vector<double> row(kDim);
    double squares = 1e-6;
    for (int32_t i = 0; i < kDim; ++i) {
      row[static_cast<size_t>(i)] =
          bf16_to_float(from[static_cast<size_t>((int64_t{token} * heads + at_head) * kDim + i)]);
      squares += row[static_cast<size_t>(i)] * row[static_cast<size_t>(i)];
    }
    if (normalises) {
      for (double& x : row) x /= std::sqrt(squares);
    }
    return row;
  };
  for (int32_t token = batch.q_indptr[request]; token < batch.q_indptr[request + 1]; ++token) {
    const auto q = row_of(batch.q, test.key_heads, key_head, token, test.l2_normalise);
    const auto k = row_of(batch.k, test.key_heads, key_head, token, test.l2_normalise);
    const auto v = row_of(batch.v, test.value_heads, head, token, false);
    const auto gate = static_cast<size_t>(int64_t{token} * test.value_heads + head);
    std::vector<double> alpha(kDim);
    for (size_t j = 0; j < kDim; ++j) {
      alpha[j] = std::exp(double{batch.log_decay[test.is_kda ? gate * kDim + j : gate]});
    }
    for (size_t i = 0; i < kDim; ++i) {
      double* s = &result.state[i * kDim];
      double recalled = 0, o = 0;
      for (size_t j = 0; j < kDim; ++j) recalled += rounded(alpha[j] * s[j]) * k[j];
      const double u = rounded(batch.beta[gate] * (v[i] - recalled));
      for (size_t j = 0; j < kDim; ++j) {
        s[j] = alpha[j] * s[j] + u * k[j];
        o += rounded(s[j]) * q[j];
      }
      result.out.push_back(o / std::sqrt(double{kDim}));
    }
  }
  return result;
}

// Returns the largest error of a row relative to its largest value.
inline double row_error(std::span<const double> got, std::span<const double> want) {
  double error = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = std::abs(got[i] - want[i]);
    if (!(difference <= error)) error = difference;  // NaN too
    largest = std::max(largest, std::abs(want[i]));
  }
  return largest > 0 ? error / largest : error;
}

}  // namespace fovea::kernels::cuda
