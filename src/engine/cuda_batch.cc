// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda_batch.h"

#include <algorithm>

#include "core/rounding.h"
#include "engine/sampler.h"
#include "kernels/cuda/store.h"
#include "kernels/philox.h"

namespace fovea {

namespace cuda = kernels::cuda;

namespace {

// Describes how to draw the part's next token from the given row of logits.
cuda::Draw draw_of(const PassPart& part, int32_t row) {
  cuda::Draw draw{.row = -1};
  if (part.sampling == nullptr) return draw;
  const SamplingParams& params = *part.sampling;
  const auto position = static_cast<uint64_t>(part.begin) + part.tokens.size();
  draw.uniform = kernels::uniform_at(params.seed, position);
  draw.row = row;
  draw.top_k = params.top_k;
  draw.temperature = params.temperature;
  draw.top_p = params.top_p;
  draw.min_p = params.min_p;
  return draw;
}

}  // namespace

CudaBatch::Layout CudaBatch::layout(const BatchLimits& limits) {
  constexpr size_t kAlignment = 256;
  const auto tokens = static_cast<size_t>(limits.max_tokens);
  const auto requests = static_cast<size_t>(limits.max_requests);
  Layout at{};
  const auto take = [&](size_t bytes) {
    const size_t begin = at.total;
    at.total += round_up(bytes, kAlignment);
    return begin;
  };
  at.tokens = take(tokens * sizeof(int32_t));
  at.positions = take(tokens * sizeof(int32_t));
  at.logit_rows = take(tokens * sizeof(int32_t));
  at.token_rows = take(tokens * sizeof(int32_t));
  at.out_slots = take(tokens * sizeof(int64_t));
  at.q_indptr = take((requests + 1) * sizeof(int32_t));
  at.kv_lens = take(requests * sizeof(int32_t));
  at.rows = take(requests * sizeof(int32_t));
  at.state_slots = take(requests * sizeof(int32_t));
  at.shared_prefix = take(requests * sizeof(int32_t));
  at.draws = take(requests * sizeof(cuda::Draw));
  return at;
}

size_t CudaBatch::bytes(const BatchLimits& limits) {
  const size_t rows = static_cast<size_t>(limits.max_requests) + 1;
  return layout(limits).total + rows * static_cast<size_t>(limits.max_kv_len) * sizeof(int32_t);
}

CudaBatch::CudaBatch(const BatchLimits& limits, const RequestTable& table, int sm)
    : recorder_(sm, cuda::kernel_store()),
      sampling_(sm, cuda::kernel_store()),
      limits_(limits),
      at_(layout(limits)),
      table_rows_(table.max_requests()),
      table_stride_(table.row_stride()),
      pinned_(at_.total),
      q_lens_(static_cast<size_t>(limits.max_requests)),
      drawn_(static_cast<size_t>(limits.max_requests) * sizeof(int32_t)),
      arrays_(at_.total),
      table_(static_cast<size_t>(table.max_requests()) * static_cast<size_t>(table.row_stride()) *
             sizeof(int32_t)) {
  std::fill_n(pinned_.data<std::byte>(), at_.total, std::byte{0});
  std::fill_n(drawn_.data<int32_t>(), limits.max_requests, -1);
  pad({}, {.requests = limits.max_requests,
           .tokens = limits.max_tokens,
           .logit_rows = limits.max_tokens});
  gpu::copy_to_device(arrays_.data(), pinned_.data(), at_.total, nullptr);
  gpu::fill_bytes(table_.data(), 0, table_.bytes(), nullptr);
  gpu::synchronize(nullptr);
}

PassSize CudaBatch::fill(std::span<const PassPart> parts, RequestTable& table) {
  PassSize size = fill_arrays(
      parts, limits_, table,
      {host<int32_t>(at_.tokens), host<int32_t>(at_.positions), host<int32_t>(at_.logit_rows),
       host<int64_t>(at_.out_slots), host<int32_t>(at_.q_indptr), host<int32_t>(at_.kv_lens),
       host<int32_t>(at_.rows)});
  int32_t* token_rows = host<int32_t>(at_.token_rows);
  int32_t logit_rows = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const PassPart& part = parts[i];
    const auto count = static_cast<int32_t>(part.tokens.size());
    token_rows = std::fill_n(token_rows, count, part.lease->row);
    q_lens_[i] = count;
    host<int32_t>(at_.state_slots)[i] = part.lease->state_slot;
    logit_rows += part.logit_rows;
    host<cuda::Draw>(at_.draws)[i] = draw_of(part, logit_rows - 1);
    drawn_.data<int32_t>()[i] = -1;
    size.draws |= part.sampling != nullptr;
  }
  return size;
}

void CudaBatch::pad(const PassSize& filled, const PassSize& padded) {
  for (int32_t i = filled.tokens; i < padded.tokens; ++i) {
    host<int32_t>(at_.tokens)[i] = host<int32_t>(at_.positions)[i] = 0;
    host<int32_t>(at_.token_rows)[i] = 0;
    host<int64_t>(at_.out_slots)[i] = -1;
  }
  for (int32_t i = filled.logit_rows; i < padded.logit_rows; ++i) {
    host<int32_t>(at_.logit_rows)[i] = i;
  }
  for (int32_t i = filled.requests; i < padded.requests; ++i) {
    host<cuda::Draw>(at_.draws)[i].row = -1;
    host<int32_t>(at_.kv_lens)[i] = host<int32_t>(at_.rows)[i] = 0;
    host<int32_t>(at_.state_slots)[i] = -1;
    shared_prefix()[static_cast<size_t>(i)] = 0;
    host<int32_t>(at_.q_indptr)[i + 1] = filled.tokens;
  }
}

// A kernel enters the slots of new tokens on the device, so that a decode step copies none of the
// table. Copies remain for prefixes found in the cache and for pages exchanged for equal ones.
void CudaBatch::upload(std::span<const PassPart> parts, RequestTable& table, Stream stream) {
  gpu::copy_to_device(arrays_.data(), pinned_.data(), at_.total, stream);
  for (const PassPart& part : parts) {
    const int32_t row = part.lease->row;
    const int32_t changed = table.take_changed(row);
    if (changed >= part.begin) continue;
    gpu::copy_to_device(table_.data<int32_t>() + row * table_stride_ + changed,
                        table.row(row).data() + changed,
                        static_cast<size_t>(part.begin - changed) * sizeof(int32_t), stream);
  }
}

void CudaBatch::record_slots(const PassSize& size, Stream stream) const {
  const cuda::RecordSlotsParams params{device<int32_t>(at_.token_rows),
                                       device<int32_t>(at_.positions),
                                       device<int64_t>(at_.out_slots),
                                       table_.data<int32_t>(),
                                       table_stride_,
                                       size.tokens};
  recorder_.record(params, stream);
}

void CudaBatch::draw(const PassSize& size, const float* logits, int32_t vocabulary,
                     Stream stream) const {
  const cuda::DrawParams params{logits, vocabulary, device<cuda::Draw>(at_.draws),
                                drawn_.data<int32_t>(), vocabulary};
  sampling_.draw(params, size.requests, stream);
}

BatchView CudaBatch::view(const PassSize& size) const {
  const auto requests = static_cast<size_t>(size.requests);
  BatchView view;
  view.mode = size.mode;
  view.requests = size.requests;
  view.tokens = size.tokens;
  view.hints.max_q_len = size.max_q_len;
  view.hints.max_kv_len = size.max_kv_len;
  if (size.mode != ForwardMode::decode) {
    view.hints.host_q_lens = std::span(q_lens_).first(requests);
    view.hints.host_kv_lens = {host<int32_t>(at_.kv_lens), requests};
  }
  view.q_indptr = {device<int32_t>(at_.q_indptr), requests + 1};
  view.kv_lens = {device<int32_t>(at_.kv_lens), requests};
  view.request_rows = {device<int32_t>(at_.rows), requests};
  view.table = {.entries = table_.data<int32_t>(), .stride = table_stride_, .rows = table_rows_};
  view.out_slots = {device<int64_t>(at_.out_slots), static_cast<size_t>(size.tokens)};
  view.linear.state_slots = {device<int32_t>(at_.state_slots), requests};
  if (size.shares_prefixes) {
    view.hints.shared_prefix = {device<int32_t>(at_.shared_prefix), requests};
  }
  view.hints.prefix_written = true;  // the prefix cache shares only filled pages
  return view;
}

ModelInputs CudaBatch::inputs(const PassSize& size) const {
  const auto tokens = static_cast<size_t>(size.tokens);
  return {{device<int32_t>(at_.tokens), tokens},
          {device<int32_t>(at_.positions), tokens},
          {device<int32_t>(at_.logit_rows), static_cast<size_t>(size.logit_rows)}};
}

}  // namespace fovea
