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

CudaBatch::Layout CudaBatch::layout_from(size_t begin, const BatchLimits& limits,
                                         int32_t max_tokens) {
  constexpr size_t kAlignment = 256;
  const auto tokens = static_cast<size_t>(max_tokens);
  const auto requests = static_cast<size_t>(limits.max_requests);
  Layout at{};
  at.begin = at.end = begin;
  const auto take = [&](size_t bytes) {
    const size_t first = at.end;
    at.end += round_up(bytes, kAlignment);
    return first;
  };
  at.tokens = take(tokens * sizeof(int32_t));
  at.positions = take(tokens * sizeof(int32_t));
  at.logit_rows = take(tokens * sizeof(int32_t));
  at.token_rows = take(tokens * sizeof(int32_t));
  at.drawn_by = take(tokens * sizeof(int32_t));
  at.out_slots = take(tokens * sizeof(int64_t));
  at.q_indptr = take((requests + 1) * sizeof(int32_t));
  at.kv_lens = take(requests * sizeof(int32_t));
  at.rows = take(requests * sizeof(int32_t));
  at.state_slots = take(requests * sizeof(int32_t));
  at.shared_prefix = take(requests * sizeof(int32_t));
  at.draws = take(requests * sizeof(cuda::Draw));
  return at;
}

CudaBatch::Layouts CudaBatch::layouts(const BatchLimits& limits) {
  const Layout few = layout_from(0, limits, std::min(limits.max_requests, limits.max_tokens));
  return {few, layout_from(few.end, limits, limits.max_tokens)};
}

size_t CudaBatch::bytes(const BatchLimits& limits) {
  const size_t requests = static_cast<size_t>(limits.max_requests);
  return layouts(limits).many.end + requests * sizeof(int32_t) +
         (requests + 1) * static_cast<size_t>(limits.max_kv_len) * sizeof(int32_t);
}

CudaBatch::CudaBatch(const BatchLimits& limits, const RequestTable& table, int sm)
    : recorder_(sm, cuda::kernel_store()),
      sampling_(sm, cuda::kernel_store()),
      limits_(limits),
      at_(layouts(limits)),
      table_rows_(table.max_requests()),
      table_stride_(table.row_stride()),
      pinned_(kPlaces * at_.many.end),
      q_lens_(static_cast<size_t>(limits.max_requests)),
      drawn_host_(kPlaces * static_cast<size_t>(limits.max_requests) * sizeof(int32_t)),
      drawn_(static_cast<size_t>(limits.max_requests) * sizeof(int32_t)),
      arrays_(at_.many.end),
      table_(static_cast<size_t>(table.max_requests()) * static_cast<size_t>(table.row_stride()) *
             sizeof(int32_t)) {
  std::fill_n(pinned_.data<std::byte>(), pinned_.bytes(), std::byte{0});
  std::fill_n(drawn_host_.data<int32_t>(), drawn_host_.bytes() / sizeof(int32_t), -1);
  clear(at_.few, std::min(limits.max_requests, limits.max_tokens));
  clear(at_.many, limits.max_tokens);
  gpu::copy_to_device(arrays_.data(), pinned_.data(), arrays_.bytes(), nullptr);
  gpu::fill_bytes(drawn_.data(), 0xff, drawn_.bytes(), nullptr);
  gpu::fill_bytes(table_.data(), 0, table_.bytes(), nullptr);
  gpu::synchronize(nullptr);
}

void CudaBatch::clear(const Layout& at, int32_t max_tokens) {
  pad(at, {}, {.requests = limits_.max_requests, .tokens = max_tokens, .logit_rows = max_tokens});
}

PassSize CudaBatch::fill(std::span<const PassPart> parts, RequestTable& table) {
  int64_t count = 0;
  for (const PassPart& part : parts) count += static_cast<int64_t>(part.tokens.size());
  const Layout& at = count <= limits_.max_requests ? at_.few : at_.many;
  place_ = (place_ + 1) % kPlaces;
  PassSize size;
  try {
    size = fill_arrays(
        parts, limits_, table,
        {host<int32_t>(at.tokens), host<int32_t>(at.positions), host<int32_t>(at.logit_rows),
         host<int64_t>(at.out_slots), host<int32_t>(at.q_indptr), host<int32_t>(at.kv_lens),
         host<int32_t>(at.rows)});
  } catch (...) {
    step_back();
    throw;
  }
  int32_t* token_rows = host<int32_t>(at.token_rows);
  int32_t* drawn_by = host<int32_t>(at.drawn_by);
  int32_t logit_rows = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const PassPart& part = parts[i];
    const auto tokens = static_cast<int32_t>(part.tokens.size());
    token_rows = std::fill_n(token_rows, tokens, part.lease->row);
    drawn_by = std::fill_n(drawn_by, tokens, part.drawn_by);
    q_lens_[i] = tokens;
    host<int32_t>(at.state_slots)[i] = part.lease->state_slot;
    logit_rows += part.logit_rows;
    host<cuda::Draw>(at.draws)[i] = draw_of(part, logit_rows - 1);
    size.draws |= part.sampling != nullptr;
  }
  return size;
}

void CudaBatch::pad(const PassSize& filled, const PassSize& padded) {
  pad(layout(padded.tokens), filled, padded);
}

void CudaBatch::pad(const Layout& at, const PassSize& filled, const PassSize& padded) {
  for (int32_t i = filled.tokens; i < padded.tokens; ++i) {
    host<int32_t>(at.tokens)[i] = host<int32_t>(at.positions)[i] = 0;
    host<int32_t>(at.token_rows)[i] = 0;
    host<int32_t>(at.drawn_by)[i] = -1;
    host<int64_t>(at.out_slots)[i] = -1;
  }
  for (int32_t i = filled.logit_rows; i < padded.logit_rows; ++i) {
    host<int32_t>(at.logit_rows)[i] = i;
  }
  for (int32_t i = filled.requests; i < padded.requests; ++i) {
    host<cuda::Draw>(at.draws)[i].row = -1;
    host<int32_t>(at.kv_lens)[i] = host<int32_t>(at.rows)[i] = 0;
    host<int32_t>(at.state_slots)[i] = -1;
    host<int32_t>(at.shared_prefix)[i] = 0;
    host<int32_t>(at.q_indptr)[i + 1] = filled.tokens;
  }
}

// A kernel enters the slots of new tokens on the device, so that a decode step copies none of the
// table. Copies remain for prefixes found in the cache and for pages exchanged for equal ones.
// The driver has read their source, which is pageable, when the call returns.
void CudaBatch::upload(const PassSize& size, std::span<const PassPart> parts, RequestTable& table,
                       Stream stream) {
  const Layout& at = layout(size.tokens);
  gpu::copy_to_device(device<std::byte>(at.begin), host<std::byte>(at.begin), at.end - at.begin,
                      stream);
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
  const Layout& at = layout(size.tokens);
  const cuda::RecordSlotsParams params{device<int32_t>(at.token_rows),
                                       device<int32_t>(at.positions),
                                       device<int64_t>(at.out_slots),
                                       table_.data<int32_t>(),
                                       table_stride_,
                                       device<int32_t>(at.drawn_by),
                                       drawn_.data<int32_t>(),
                                       device<int32_t>(at.tokens),
                                       size.tokens};
  recorder_.record(params, stream);
}

void CudaBatch::draw(const PassSize& size, const float* logits, int32_t vocabulary,
                     Stream stream) const {
  const cuda::DrawParams params{logits, vocabulary, device<cuda::Draw>(layout(size.tokens).draws),
                                drawn_.data<int32_t>(), vocabulary};
  sampling_.draw(params, size.requests, stream);
}

void CudaBatch::return_drawn(const PassSize& size, Stream stream) {
  int32_t* const to =
      drawn_host_.data<int32_t>() + place_ * static_cast<size_t>(limits_.max_requests);
  gpu::copy_to_host(to, drawn_.data(), static_cast<size_t>(size.requests) * sizeof(int32_t),
                    stream);
}

BatchView CudaBatch::view(const PassSize& size) const {
  const Layout& at = layout(size.tokens);
  const auto requests = static_cast<size_t>(size.requests);
  BatchView view;
  view.mode = size.mode;
  view.requests = size.requests;
  view.tokens = size.tokens;
  view.hints.max_q_len = size.max_q_len;
  view.hints.max_kv_len = size.max_kv_len;
  if (size.mode != ForwardMode::decode) {
    view.hints.host_q_lens = std::span(q_lens_).first(requests);
    view.hints.host_kv_lens = {host<int32_t>(at.kv_lens), requests};
  }
  view.q_indptr = {device<int32_t>(at.q_indptr), requests + 1};
  view.kv_lens = {device<int32_t>(at.kv_lens), requests};
  view.request_rows = {device<int32_t>(at.rows), requests};
  view.table = {.entries = table_.data<int32_t>(), .stride = table_stride_, .rows = table_rows_};
  view.out_slots = {device<int64_t>(at.out_slots), static_cast<size_t>(size.tokens)};
  view.linear.state_slots = {device<int32_t>(at.state_slots), requests};
  if (size.shares_prefixes) {
    view.hints.shared_prefix = {device<int32_t>(at.shared_prefix), requests};
  }
  view.hints.prefix_written = true;  // the prefix cache shares only filled pages
  return view;
}

ModelInputs CudaBatch::inputs(const PassSize& size) const {
  const Layout& at = layout(size.tokens);
  const auto tokens = static_cast<size_t>(size.tokens);
  return {{device<int32_t>(at.tokens), tokens},
          {device<int32_t>(at.positions), tokens},
          {device<int32_t>(at.logit_rows), static_cast<size_t>(size.logit_rows)}};
}

}  // namespace fovea
