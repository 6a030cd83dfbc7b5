// SPDX-License-Identifier: Apache-2.0
// Queries and states of context parallel attention on the CPU. States travel in fp32: each rank
// sends a part for every rank, which holds the outputs of that rank's heads and then their LSE.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/host/row_copy.h"
#include "attention/row_views.h"
#include "core/check.h"
#include "core/checked_math.h"
#include "dist/context_checks.h"
#include "dist/cuda_context_exchange.h"
#include "fovea/context_parallel.h"
#include "kernels/cpu/cpu.h"

namespace fovea {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

class HostContextExchange final : public ContextExchange {
 public:
  HostContextExchange(const ContextExchangeShape& shape, Communicator& ranks, ThreadPool& threads)
      : shape_(shape), ranks_(ranks), threads_(threads) {
    const int64_t rows = int64_t{shape.max_tokens} * shape.heads;
    const int64_t parts =
        checked_product("max_tokens * heads * ranks", {rows, int64_t{ranks.size()}});
    const int64_t floats = checked_product("max_tokens * heads * ranks * (dim + 1)",
                                           {parts, std::max(shape.q_dim, shape.dim) + int64_t{1}});
    send_.resize(static_cast<size_t>(floats));
    receive_.resize(static_cast<size_t>(floats));
    merged_.resize(static_cast<size_t>(rows * shape.dim));
    if (shape.merge == ContextMerge::gather_scatter) {
      lse_.resize(static_cast<size_t>(parts) * static_cast<size_t>(ranks.size()));
      weights_.resize(static_cast<size_t>(parts));
    }
    own_lse_.resize(static_cast<size_t>(rows));
  }

  void gather_queries(const HeadRows& q, const HeadRows& all, int64_t tokens, Stream) override {
    check_rows(q, "q", tokens);
    check_rows(all, "all", tokens);
    const int64_t values = tokens * shape_.heads * shape_.q_dim;
    const HeadRows own = packed(send_.data(), shape_.q_dim);
    copy_rows({q, own, tokens, shape_.heads, shape_.q_dim}, threads_);
    ranks_.all_gather(send_.data(), receive_.data(), bytes(values));
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      copy_rows({packed(receive_.data() + rank * values, shape_.q_dim), heads_of(all, rank), tokens,
                 shape_.heads, shape_.q_dim},
                threads_);
    }
  }

  void merge(const AttentionState& part, const AttentionState& merged, int64_t tokens,
             const float* sinks, Stream) override {
    check_rows(part.out, "part.out", tokens);
    check_rows(merged.out, "merged.out", tokens);
    check_argument(part.lse || tokens == 0, "part.lse is absent");
    if (shape_.merge == ContextMerge::all_to_all) {
      exchange_states(part, tokens, sinks);
    } else {
      sum_weighted(part, tokens, sinks);
    }
    copy_rows({packed(merged_.data(), shape_.dim), merged.out, tokens, shape_.heads, shape_.dim},
              threads_);
    if (merged.lse) std::copy_n(own_lse_.begin(), tokens * shape_.heads, merged.lse.data);
  }

 private:
  void check_rows(const HeadRows& rows, std::string_view name, int64_t tokens) const {
    check_exchanged_rows(shape_, rows, name, tokens);
  }
  static size_t bytes(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }
  HeadRows packed(float* data, int32_t dim) const {
    return dense_rows(data, DType::f32, shape_.heads, dim);
  }
  // The rows of one rank's heads.
  HeadRows heads_of(const HeadRows& rows, int rank) const {
    return rows ? from_head(rows, int64_t{rank} * shape_.heads) : rows;
  }
  int64_t all_heads() const { return int64_t{ranks_.size()} * shape_.heads; }

  void exchange_states(const AttentionState& part, int64_t tokens, const float* sinks) {
    const int64_t rows = tokens * shape_.heads, values = rows * shape_.dim;
    const int64_t stride = values + rows;  // floats of one part
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      float* const out = send_.data() + rank * stride;
      copy_rows(
          {heads_of(part.out, rank), packed(out, shape_.dim), tokens, shape_.heads, shape_.dim},
          threads_);
      for (int64_t token = 0; token < tokens; ++token) {
        std::copy_n(part.lse.data + token * all_heads() + rank * shape_.heads, shape_.heads,
                    out + values + token * shape_.heads);
      }
    }
    ranks_.all_to_all(send_.data(), receive_.data(), bytes(stride));
    kernels::MergeStatesParams params;
    params.o = receive_.data();
    params.lse = receive_.data() + values;
    params.o_part_stride = params.lse_part_stride = stride;
    params.parts = ranks_.size();
    params.rows = tokens;
    params.heads = shape_.heads;
    params.dim = shape_.dim;
    params.sinks = sinks;
    params.out = merged_.data();
    params.out_lse = own_lse_.data();
    kernels::cpu::merge_states(params, threads_);
  }

  void sum_weighted(const AttentionState& part, int64_t tokens, const float* sinks) {
    const int64_t rows = tokens * all_heads(), values = tokens * shape_.heads * shape_.dim;
    ranks_.all_gather(part.lse.data, lse_.data(), bytes(rows));
    for (int64_t row = 0; row < rows; ++row) weigh(row, rows);
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      float* const out = send_.data() + rank * values;
      copy_rows(
          {heads_of(part.out, rank), packed(out, shape_.dim), tokens, shape_.heads, shape_.dim},
          threads_);
      for (int64_t row = 0; row < tokens * shape_.heads; ++row) {
        const int64_t token = row / shape_.heads, head = row % shape_.heads;
        const float weight =
            weights_[static_cast<size_t>(token * all_heads() + rank * shape_.heads + head)];
        float* const values_of_row = out + row * shape_.dim;
        for (int32_t d = 0; d < shape_.dim; ++d) {
          values_of_row[d] = weight == 0 ? 0.0f : values_of_row[d] * weight;  // not 0 * NaN
        }
      }
    }
    ranks_.reduce_scatter(send_.data(), merged_.data(), values, DType::f32, ReduceOp::sum);
    for (int64_t row = 0; sinks != nullptr && row < tokens * shape_.heads; ++row) {
      const float lse = own_lse_[static_cast<size_t>(row)];
      const float share = 1 / (1 + std::exp(sinks[row % shape_.heads] - lse));
      for (int32_t d = 0; d < shape_.dim; ++d) {
        merged_[static_cast<size_t>(row * shape_.dim + d)] *= share;
      }
    }
  }

  // Sets the weight of this rank's output of a (token, head) row, and the LSE of own heads.
  void weigh(int64_t row, int64_t rows) {
    const auto lse_of = [&](int rank) { return lse_[static_cast<size_t>(rank * rows + row)]; };
    float maximum = kEmpty;
    for (int rank = 0; rank < ranks_.size(); ++rank) maximum = std::max(maximum, lse_of(rank));
    double sum = 0;
    for (int rank = 0; rank < ranks_.size() && maximum > kEmpty; ++rank) {
      sum += std::exp(double{lse_of(rank)} - maximum);
    }
    const double own = lse_of(ranks_.rank());
    weights_[static_cast<size_t>(row)] =
        own == kEmpty ? 0.0f : static_cast<float>(std::exp(own - maximum) / sum);
    const int64_t head = row % all_heads() - int64_t{ranks_.rank()} * shape_.heads;
    if (head < 0 || head >= shape_.heads) return;
    const int64_t token = row / all_heads();
    own_lse_[static_cast<size_t>(token * shape_.heads + head)] =
        maximum == kEmpty ? kEmpty : static_cast<float>(maximum + std::log(sum));
  }

  const ContextExchangeShape shape_;
  Communicator& ranks_;
  ThreadPool& threads_;
  std::vector<float> send_, receive_, merged_;  // parts of all ranks; this rank's result
  std::vector<float> lse_;                      // [ranks, tokens, ranks * heads]
  std::vector<float> weights_;                  // [tokens, ranks * heads]
  std::vector<float> own_lse_;                  // [tokens, heads]
};

}  // namespace

std::unique_ptr<ContextExchange> make_context_exchange(const ContextExchangeShape& shape,
                                                       Communicator& ranks, ThreadPool& threads) {
  check_exchange_shape(shape, ranks);
  if (shape.device.kind == DeviceKind::cpu) {
    return std::make_unique<HostContextExchange>(shape, ranks, threads);
  }
  auto links = std::make_unique<ContextLinks>(ranks, shape.device.index);
  ContextLinks& own = *links;
  return std::make_unique<CudaContextExchange>(shape, own, std::move(links));
}

}  // namespace fovea
