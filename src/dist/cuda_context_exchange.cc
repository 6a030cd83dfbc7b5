// SPDX-License-Identifier: Apache-2.0
#include "dist/cuda_context_exchange.h"

#include <algorithm>

#include "core/check.h"
#include "dist/context_checks.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

constexpr int32_t kQuadValues = 8;  // 16-bit values of 16 bytes

const ContextExchangeShape& checked(const ContextExchangeShape& shape) {
  if (dtype_bytes(shape.dtype) != 2) {
    fail(ErrorCode::unsupported, "dtype is {}, on a GPU accepted: bf16, fp16",
         dtype_name(shape.dtype));
  }
  for (const auto& [name, dim] : {std::pair{"q_dim", shape.q_dim}, {"dim", shape.dim}}) {
    if (dim % kQuadValues == 0) continue;
    fail(ErrorCode::unsupported, "{} is {}, must be a multiple of {} on a GPU", name, dim,
         kQuadValues);
  }
  if (shape.merge != ContextMerge::all_to_all) {
    fail(ErrorCode::unsupported, "merge is gather_scatter, GPUs exchange states all to all");
  }
  return shape;
}

const gpu::Context& bound(const gpu::Context& context) {
  context.bind();
  return context;
}

cuda::ExchangedRows checked_rows(const HeadRows& rows, std::string_view name) {
  check_argument(reinterpret_cast<uintptr_t>(rows.data) % 16 == 0,
                 "{} is at {}, a GPU needs it aligned to 16 bytes", name, rows.data);
  for (const int64_t stride : {rows.token_stride, rows.head_stride}) {
    check_argument(stride % kQuadValues == 0,
                   "a stride of {} is {} values, a GPU needs a multiple of {}", name, stride,
                   kQuadValues);
  }
  return {rows.data, rows.token_stride, rows.head_stride};
}

}  // namespace

CudaContextExchange::CudaContextExchange(const ContextExchangeShape& shape, ContextLinks& links,
                                         std::unique_ptr<ContextLinks> own)
    : shape_(checked(shape)),
      own_links_(std::move(own)),
      links_(links),
      mail_(shape.dtype, bound(links.context()).info().sm, links.context().info().cores,
            cuda::kernel_store()) {
  check_argument(tokens_at_once(shape.q_dim / 2) > 0 && tokens_at_once(shape.dim / 2 + 1) > 0,
                 "heads is {}: a token's heads do not fit into a message of {} bytes", shape.heads,
                 links.max_words() * 4);
}

int64_t CudaContextExchange::tokens_at_once(int64_t words_of_head) const {
  constexpr int64_t kPadding = 3;
  return (links_.max_words() - kPadding) / (shape_.heads * words_of_head);
}

// Launches the kernels of a call piece by piece, with `communicate` between two where peers' memory
// does not serve.
template <typename Params, typename Launch, typename Communicate>
void CudaContextExchange::run(Params params, const Pieces& pieces, const Launch& launch,
                              const Communicate& communicate) {
  links_.context().bind();
  params.rows = {order_, 0, 0, shape_.heads, pieces.dim / kQuadValues};
  for (int64_t first = 0; first < pieces.tokens; first += pieces.at_once) {
    params.rows.first = static_cast<int32_t>(first);
    params.rows.tokens = static_cast<int32_t>(std::min(pieces.at_once, pieces.tokens - first));
    params.boxes = links_.boxes();
    if (links_.communicator() == nullptr || links_.rehearses()) {
      launch(params);
      continue;
    }
    const int64_t words = cuda::ContextMail::words(params);
    const ContextLinks::Posted posted = links_.post(words, pieces.has_parts);
    params.boxes = posted.before;
    launch(params);
    communicate(posted, static_cast<size_t>(words) * sizeof(uint32_t));
    params.boxes = posted.after;
    launch(params);
  }
}

void CudaContextExchange::gather_queries(const HeadRows& q, const HeadRows& all, int64_t tokens,
                                         Stream stream) {
  check_exchanged_rows(shape_, q, "q", tokens);
  check_exchanged_rows(shape_, all, "all", tokens);
  if (tokens == 0) return;
  cuda::GatherQueriesParams params{};
  params.q = checked_rows(q, "q");
  params.all = checked_rows(all, "all");
  run(
      params, {tokens, shape_.q_dim, tokens_at_once(shape_.q_dim / 2), false},
      [&](const auto& piece) { mail_.gather(piece, stream); },
      [&](const ContextLinks::Posted& posted, size_t bytes) {
        links_.communicator()->all_gather(posted.send, posted.receive, bytes, stream);
      });
}

void CudaContextExchange::merge(const AttentionState& part, const AttentionState& merged,
                                int64_t tokens, const float* sinks, Stream stream) {
  check_exchanged_rows(shape_, part.out, "part.out", tokens);
  check_exchanged_rows(shape_, merged.out, "merged.out", tokens);
  check_argument(part.lse || tokens == 0, "part.lse is absent");
  if (tokens == 0) return;
  cuda::MergeContextParams params{};
  params.part = checked_rows(part.out, "part.out");
  params.lse = part.lse.data;
  params.merged = checked_rows(merged.out, "merged.out");
  params.merged_lse = merged.lse.data;
  params.sinks = sinks;
  run(
      params, {tokens, shape_.dim, tokens_at_once(shape_.dim / 2 + 1), true},
      [&](const auto& piece) { mail_.merge(piece, stream); },
      [&](const ContextLinks::Posted& posted, size_t bytes) {
        links_.communicator()->all_to_all(posted.send, posted.receive, bytes, stream);
      });
}

}  // namespace fovea
