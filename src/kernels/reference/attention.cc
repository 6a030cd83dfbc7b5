// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "core/float_types.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/rows.h"

namespace fovea::kernels::reference {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

// A task computes the query rows of up to kTaskRows / group tokens under one kv head, so that a key
// row is converted once for all of them.
constexpr int32_t kTaskRows = 64;

struct Request {
  int32_t index = 0;
  int64_t first_row = 0;  // row of q and out
  int32_t q_len = 0;
  int32_t kv_len = 0;
};

Request request_of(const AttentionParams& params, int32_t index) {
  const int32_t begin = params.q_indptr[index];
  return {index, begin, params.q_indptr[index + 1] - begin, params.kv_lens[index]};
}

// Implements the definitions of AttentionMask word for word.
class Visibility {
 public:
  Visibility(const AttentionParams& params, const Request& request)
      : mask_(params.mask),
        chunks_(params.chunks),
        request_(request),
        cached_(request.kv_len - request.q_len) {}

  int64_t query_position(int32_t token) const {
    return mask_.positions ? mask_.positions[request_.first_row + token] : cached_ + token;
  }

  int64_t key_position(int32_t key) const {
    return key < cached_ ? key : query_position(key - cached_);
  }

  bool visible(int32_t key, int32_t token) const {
    if (mask_.first_keys && key < mask_.first_keys[request_.index]) return false;
    const int64_t from = query_position(token);
    const int64_t at = key_position(key);
    if (mask_.spans && same_span(at, from)) return true;
    return in_order(key, token) && (mask_.window == 0 || at > from - mask_.window) &&
           (mask_.chunk == 0 || in_chunk(at, from)) &&
           (!mask_.item_prefix_lens || in_item(at, from)) &&
           (!mask_.custom || custom_byte(key, token) != 0);
  }

 private:
  bool in_order(int32_t key, int32_t token) const {
    if (mask_.tree && key >= cached_) {
      return (mask_.tree[request_.first_row + token] >> (key - cached_)) & 1;
    }
    return !mask_.causal || key <= cached_ + token;
  }

  bool in_chunk(int64_t key_at, int64_t query_at) const {
    const int64_t back = query_at / mask_.chunk - key_at / mask_.chunk;
    return back >= chunks_.nearest && back <= chunks_.farthest;
  }

  bool in_item(int64_t key_at, int64_t query_at) const {
    const int64_t prefix = mask_.item_prefix_lens[request_.index];
    if (query_at < prefix || key_at < prefix) return true;
    const uint16_t* in_items =
        mask_.token_pos_in_items + request_.index * mask_.token_pos_in_items_stride;
    return key_at >= query_at - in_items[query_at - prefix];
  }

  bool same_span(int64_t key_at, int64_t query_at) const {
    for (int32_t s = mask_.span_indptr[request_.index]; s < mask_.span_indptr[request_.index + 1];
         ++s) {
      const int32_t begin = mask_.spans[2 * s];
      const int32_t end = mask_.spans[2 * s + 1];
      if (begin <= query_at && query_at < end && begin <= key_at && key_at < end) return true;
    }
    return false;
  }

  uint8_t custom_byte(int32_t key, int32_t token) const {
    return mask_.custom[mask_.custom_indptr[request_.index] +
                        static_cast<int64_t>(token) * request_.kv_len + key];
  }

  const AttentionMask& mask_;
  const ChunkReach& chunks_;
  const Request& request_;
  int32_t cached_;  // negative when there are more new tokens than keys
};

int64_t slot_of_key(const KeySource& keys, const Request& request, int32_t key) {
  const int32_t page_size = keys.cache.page_size;
  const int64_t entry = request.index * keys.page_table_stride + key / page_size;
  const int64_t page = keys.page_table[entry];
  check_argument(page >= 0 && (page + 1) * page_size <= keys.cache.slots,
                 "page_table entry {} of request {} is page {}, the cache has {} pages",
                 key / page_size, request.index, page, keys.cache.slots / page_size);
  return page * page_size + key % page_size;
}

void load_key(const AttentionParams& params, const Request& request, int32_t key, int32_t head,
              double* to) {
  const KeySource& keys = params.keys;
  if (keys.page_table) {
    const CacheRow row = {slot_of_key(keys, request, key), head, params.kv_heads};
    load_k_row(keys.cache, row, params.head_dim, to);
  } else {
    load_row(keys.k, keys.kv_indptr[request.index] + key, head, params.head_dim, to);
  }
}

void load_value(const AttentionParams& params, const Request& request, int32_t key, int32_t head,
                double* to) {
  const KeySource& keys = params.keys;
  if (keys.page_table) {
    const CacheRow row = {slot_of_key(keys, request, key), head, params.kv_heads};
    load_v_row(keys.cache, row, params.head_dim_v, to);
  } else {
    load_row(keys.v, keys.kv_indptr[request.index] + key, head, params.head_dim_v, to);
  }
}

void load_query(const AttentionParams& params, int64_t row, int32_t head, double* to) {
  const int32_t front = params.q_rope ? params.q_split_dim : params.head_dim;
  load_row(params.q, row, head, front, to);
  if (params.q_scale.data) {
    const double scale =
        params.q_scale.data[row * params.q_scale.token_stride + head * params.q_scale.head_stride];
    for (int32_t d = 0; d < front; ++d) to[d] *= scale;
  }
  if (params.q_rope) load_row(params.q_rope, row, head, params.head_dim - front, to + front);
}

// Four partial sums hide the latency of additions.
double dot(const double* a, const double* b, int32_t size) {
  double sums[4] = {0, 0, 0, 0};
  int32_t d = 0;
  for (; d + 4 <= size; d += 4) {
    for (int32_t lane = 0; lane < 4; ++lane) sums[lane] += a[d + lane] * b[d + lane];
  }
  for (; d < size; ++d) sums[0] += a[d] * b[d];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Tokens [begin, end) of one request under one kv head. Rows are (token, head of the group).
struct Task {
  Request request;
  int32_t kv_head = 0;
  int32_t begin = 0, end = 0;
};

class TaskRunner {
 public:
  TaskRunner(const AttentionParams& params, const Task& task)
      : params_(params),
        task_(task),
        visibility_(params, task_.request),
        group_(params.q_heads / params.kv_heads),
        rows_((task.end - task.begin) * group_),
        queries_(static_cast<size_t>(rows_) * params.head_dim),
        scores_(static_cast<size_t>(rows_) * task.request.kv_len, kNegativeInfinity),
        outputs_(static_cast<size_t>(rows_) * params.head_dim_v, 0.0),
        lse_(static_cast<size_t>(rows_), kNegativeInfinity) {}

  void run() {
    for (int32_t row = 0; row < rows_; ++row) {
      load_query(params_, query_row(row), q_head(row), &queries_[row * size_t(params_.head_dim)]);
    }
    compute_scores();
    normalise();
    sum_values();
    for (int32_t row = 0; row < rows_; ++row) store(row);
  }

 private:
  int32_t token(int32_t row) const { return task_.begin + row / group_; }
  int32_t q_head(int32_t row) const { return task_.kv_head * group_ + row % group_; }
  int64_t query_row(int32_t row) const { return task_.request.first_row + token(row); }
  double& score(int32_t row, int32_t key) {
    return scores_[row * static_cast<size_t>(task_.request.kv_len) + key];
  }

  double shape_score(double score, int32_t row, int32_t key) const {
    score *= params_.scale;
    if (params_.logit_cap > 0) score = params_.logit_cap * std::tanh(score / params_.logit_cap);
    if (params_.alibi_slopes) {
      const auto distance = static_cast<double>(visibility_.key_position(key) -
                                                visibility_.query_position(token(row)));
      score += params_.alibi_slopes[q_head(row)] * distance;
    }
    return score;
  }

  void compute_scores() {
    std::vector<double> key_row(static_cast<size_t>(params_.head_dim));
    for (int32_t key = 0; key < task_.request.kv_len; ++key) {
      bool loaded = false;
      for (int32_t row = 0; row < rows_; ++row) {
        if (!visibility_.visible(key, token(row))) continue;
        if (!loaded) load_key(params_, task_.request, key, task_.kv_head, key_row.data());
        loaded = true;
        const double* query = &queries_[row * static_cast<size_t>(params_.head_dim)];
        score(row, key) = shape_score(dot(query, key_row.data(), params_.head_dim), row, key);
      }
    }
  }

  // Scores become weights that sum to 1, or to 1 / (1 + e^(sink - lse)).
  void normalise() {
    for (int32_t row = 0; row < rows_; ++row) {
      double* scores = scores_.data() + row * static_cast<size_t>(task_.request.kv_len);
      double maximum = kNegativeInfinity;  // NaN if any score is NaN
      for (int32_t key = 0; key < task_.request.kv_len; ++key) {
        if (!std::isnan(maximum) && !(scores[key] <= maximum)) maximum = scores[key];
      }
      if (maximum == kNegativeInfinity) {
        std::fill(scores, scores + task_.request.kv_len, 0.0);
        continue;
      }
      double sum = 0;
      for (int32_t key = 0; key < task_.request.kv_len; ++key) {
        scores[key] = scores[key] == kNegativeInfinity ? 0.0 : std::exp(scores[key] - maximum);
        sum += scores[key];
      }
      lse_[row] = maximum + std::log(sum);
      if (params_.sinks) sum *= 1 + std::exp(params_.sinks[q_head(row)] - lse_[row]);
      for (int32_t key = 0; key < task_.request.kv_len; ++key) scores[key] /= sum;
    }
  }

  void sum_values() {
    const auto dim = static_cast<size_t>(params_.head_dim_v);
    std::vector<double> value_row(dim);
    for (int32_t key = 0; key < task_.request.kv_len; ++key) {
      bool loaded = false;
      for (int32_t row = 0; row < rows_; ++row) {
        const double weight = score(row, key);
        if (weight == 0) continue;  // hidden, or 0 in fp64
        if (!loaded) load_value(params_, task_.request, key, task_.kv_head, value_row.data());
        loaded = true;
        double* output = &outputs_[row * dim];
        for (size_t d = 0; d < dim; ++d) output[d] += weight * value_row[d];
      }
    }
  }

  void store(int32_t row) const {
    const int64_t at = query_row(row);
    const int32_t head = q_head(row);
    char* to = row_address(params_.out, at, head);
    const double* output = &outputs_[row * static_cast<size_t>(params_.head_dim_v)];
    for (int32_t d = 0; d < params_.head_dim_v; ++d) {
      store_float(to, params_.out.dtype, d, static_cast<float>(output[d]));
    }
    if (params_.lse) params_.lse[at * params_.q_heads + head] = static_cast<float>(lse_[row]);
  }

  const AttentionParams& params_;
  const Task task_;
  const Visibility visibility_;
  const int32_t group_;
  const int32_t rows_;
  std::vector<double> queries_;  // [rows, head_dim]
  std::vector<double> scores_;   // [rows, kv_len]; hidden: -inf, then 0
  std::vector<double> outputs_;  // [rows, head_dim_v]
  std::vector<double> lse_;      // [rows]
};

}  // namespace

void attention(const AttentionParams& params, ThreadPool& threads) {
  check_argument(params.kv_heads > 0 && params.q_heads % params.kv_heads == 0,
                 "q_heads is {}, must be a multiple of kv_heads, which is {}", params.q_heads,
                 params.kv_heads);
  const int32_t group = params.q_heads / params.kv_heads;
  const int32_t tile = std::max(1, kTaskRows / group);
  std::vector<Task> tasks;
  for (int32_t index = 0; index < params.requests; ++index) {
    const Request request = request_of(params, index);
    for (int32_t head = 0; head < params.kv_heads; ++head) {
      for (int32_t begin = 0; begin < request.q_len; begin += tile) {
        tasks.push_back({request, head, begin, std::min(begin + tile, request.q_len)});
      }
    }
  }
  threads.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t index, int) {
    TaskRunner(params, tasks[static_cast<size_t>(index)]).run();
  });
}

}  // namespace fovea::kernels::reference
