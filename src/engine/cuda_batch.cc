// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda_batch.h"

#include <algorithm>
#include <numeric>

#include "core/rounding.h"
#include "engine/graph_sizes.h"
#include "engine/sampler.h"
#include "kernels/cuda/store.h"
#include "kernels/philox.h"

namespace fovea {

namespace cuda = kernels::cuda;

namespace {

static_assert(sizeof(TokenLogprob) == sizeof(cuda::LikelyToken));

// Describes how to draw a token of the part from the given row of logits.
cuda::Draw draw_of(const PassPart& part, int32_t position, int32_t row) {
  const SamplingParams& params = *part.sampling;
  cuda::Draw draw{};
  draw.uniform = kernels::uniform_at(params.seed, static_cast<uint64_t>(position));
  draw.row = row;
  draw.top_k = params.top_k;
  draw.temperature = params.temperature;
  draw.top_p = params.top_p;
  draw.min_p = params.min_p;
  return draw;
}

}  // namespace

CudaBatch::Layout CudaBatch::layout_from(size_t begin, const BatchLimits& limits,
                                         int32_t max_tokens, int32_t max_draws) {
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
  at.features = take(tokens * sizeof(int32_t));
  at.places = take(tokens * sizeof(int32_t));
  at.ancestors = take(tokens * sizeof(uint64_t));
  at.token_rows = take(tokens * sizeof(int32_t));
  at.drawn_by = take(tokens * sizeof(int32_t));
  at.out_slots = take(tokens * sizeof(int64_t));
  at.snapshot_slots = take(tokens * sizeof(int32_t));
  at.q_indptr = take((requests + 1) * sizeof(int32_t));
  at.kv_lens = take(requests * sizeof(int32_t));
  at.rows = take(requests * sizeof(int32_t));
  at.draft_counts = take(requests * sizeof(int32_t));
  at.state_slots = take(requests * sizeof(int32_t));
  at.shared_prefix = take(requests * sizeof(int32_t));
  at.draws = take(static_cast<size_t>(max_draws) * sizeof(cuda::Draw));
  return at;
}

int32_t CudaBatch::few_tokens(const BatchLimits& limits, int32_t max_width) {
  const int64_t tokens =
      std::max<int64_t>(int64_t{limits.max_requests} * max_width, kMaxChunkTokens);
  return std::max(static_cast<int32_t>(std::min<int64_t>(tokens, limits.max_tokens)),
                  limits.max_requests);
}

CudaBatch::Layouts CudaBatch::layouts(const BatchLimits& limits, int32_t max_width) {
  const int32_t count = few_tokens(limits, max_width);
  const Layout few = layout_from(0, limits, std::min(count, limits.max_tokens), count);
  return {few, layout_from(few.end, limits, limits.max_tokens, count)};
}

size_t CudaBatch::bytes(const BatchLimits& limits, const DrawLimits& draws) {
  const size_t requests = static_cast<size_t>(limits.max_requests);
  const int32_t count = few_tokens(limits, draws.max_width);
  const size_t draw_bytes = static_cast<size_t>(draws.lists) * sizeof(int32_t) +
                            static_cast<size_t>(draws.likeliest) * sizeof(cuda::LikelyToken);
  return layouts(limits, draws.max_width).many.end + static_cast<size_t>(count) * draw_bytes +
         (requests + 1) * static_cast<size_t>(limits.max_kv_len) * sizeof(int32_t) +
         MaskedDraws::bytes(count, draws.mask_bits);
}

CudaBatch::CudaBatch(const BatchLimits& limits, const RequestTable& table, int sm,
                     const DrawLimits& draws, const DrawnLists& drawn)
    : recorder_(sm, cuda::kernel_store()),
      sampling_(sm, cuda::kernel_store()),
      limits_(limits),
      few_tokens_(few_tokens(limits, draws.max_width)),
      at_(layouts(limits, draws.max_width)),
      table_rows_(table.max_requests()),
      table_stride_(table.row_stride()),
      pinned_(kPlaces * at_.many.end),
      q_lens_(static_cast<size_t>(limits.max_requests)),
      drawn_host_(kPlaces * static_cast<size_t>(few_tokens_) * sizeof(int32_t)),
      lists_(static_cast<size_t>(draws.lists) * static_cast<size_t>(few_tokens_) * sizeof(int32_t)),
      drawn_(draws.lists > 0 ? DrawnLists{lists_.data<int32_t>(), nullptr} : drawn),
      own_list_(0),
      other_list_(draws.lists > 1 ? few_tokens_ : 0),
      likeliest_count_(static_cast<size_t>(draws.likeliest)),
      likeliest_host_(kPlaces * static_cast<size_t>(few_tokens_) * likeliest_count_ *
                      sizeof(TokenLogprob)),
      likeliest_(static_cast<size_t>(few_tokens_) * likeliest_count_ * sizeof(TokenLogprob)),
      arrays_(at_.many.end),
      table_(static_cast<size_t>(table.max_requests()) * static_cast<size_t>(table.row_stride()) *
             sizeof(int32_t)),
      masked_(few_tokens_, draws.mask_bits) {
  if (draws.lists > 1) drawn_.drafter = drawn_.model + few_tokens_;
  if (draws.lists == 0) own_list_ = static_cast<int32_t>(drawn_.drafter - drawn_.model);
  std::fill_n(pinned_.data<std::byte>(), pinned_.bytes(), std::byte{0});
  std::fill_n(drawn_host_.data<int32_t>(), drawn_host_.bytes() / sizeof(int32_t), -1);
  clear(at_.few, std::min(few_tokens_, limits.max_tokens));
  clear(at_.many, limits.max_tokens);
  gpu::copy_to_device(arrays_.data(), pinned_.data(), arrays_.bytes(), nullptr);
  gpu::fill_bytes(lists_.data(), 0xff, lists_.bytes(), nullptr);
  gpu::fill_bytes(table_.data(), 0, table_.bytes(), nullptr);
  gpu::synchronize(nullptr);
}

void CudaBatch::clear(const Layout& at, int32_t max_tokens) {
  pad(at, {},
      {.requests = limits_.max_requests,
       .tokens = max_tokens,
       .logit_rows = max_tokens,
       .draw_count = few_tokens_});
}

PassSize CudaBatch::fill(std::span<const PassPart> parts, RequestTable& table) {
  int64_t count = 0;
  for (const PassPart& part : parts) count += static_cast<int64_t>(part.tokens.size());
  const Layout& at = count <= few_tokens_ ? at_.few : at_.many;
  place_ = (place_ + 1) % kPlaces;
  PassSize size;
  try {
    const int32_t draws = count_draws(parts);
    check_argument(draws <= few_tokens_, "a pass draws {} tokens, the limit is {}", draws,
                   few_tokens_);
    size = fill_arrays(
        parts, limits_, table,
        {host<int32_t>(at.tokens), host<int32_t>(at.positions), host<int32_t>(at.logit_rows),
         host<int32_t>(at.features), host<int32_t>(at.places), host<uint64_t>(at.ancestors),
         host<int64_t>(at.out_slots), host<int32_t>(at.snapshot_slots), host<int32_t>(at.q_indptr),
         host<int32_t>(at.kv_lens), host<int32_t>(at.rows), host<int32_t>(at.draft_counts)});
  } catch (...) {
    step_back();
    throw;
  }
  int32_t* token_rows = host<int32_t>(at.token_rows);
  int32_t* drawn_by = host<int32_t>(at.drawn_by);
  for (size_t i = 0; i < parts.size(); ++i) {
    const PassPart& part = parts[i];
    const auto tokens = static_cast<int32_t>(part.tokens.size());
    token_rows = std::fill_n(token_rows, tokens, part.lease->row);
    drawn_by = std::fill_n(drawn_by, tokens, part.drawn_by < 0 ? -1 : own_list_ + part.drawn_by);
    std::iota(drawn_by - part.taken, drawn_by, other_list_ + part.taken_from);
    q_lens_[i] = tokens;
    host<int32_t>(at.state_slots)[i] = part.lease->state_slot;
    size.draws |= part.sampling != nullptr;
  }
  size.draw_count = fill_draws(parts, at);
  return size;
}

// Draws ascend by their rows. Each is in the list of draws or in that of masked ones, and has an
// entry in both, because its place is that of its token. Returns their number.
int32_t CudaBatch::fill_draws(std::span<const PassPart> parts, const Layout& at) {
  constexpr cuda::Draw kNone{.row = -1};
  cuda::Draw* const draws = host<cuda::Draw>(at.draws);
  masked_.clear();
  int32_t count = 0, first_row = 0;
  for (const PassPart& part : parts) {
    for (int32_t row = 0; row < part.draws(); ++row) {
      const cuda::Draw draw = part.sampling == nullptr
                                  ? kNone
                                  : draw_of(part, part.drawn_position(row), first_row + row);
      draws[count++] = part.masked ? kNone : draw;
      masked_.add(part.masked ? draw : kNone);
    }
    first_row += part.logit_rows;
  }
  return count;
}

void CudaBatch::pad(const PassSize& filled, const PassSize& padded) {
  pad(layout(padded.tokens), filled, padded);
}

void CudaBatch::pad(const Layout& at, const PassSize& filled, const PassSize& padded) {
  for (int32_t i = filled.tokens; i < padded.tokens; ++i) {
    host<int32_t>(at.tokens)[i] = host<int32_t>(at.positions)[i] = 0;
    host<int32_t>(at.token_rows)[i] = host<int32_t>(at.features)[i] = 0;
    host<int32_t>(at.places)[i] = 0;
    host<uint64_t>(at.ancestors)[i] = 0;
    host<int32_t>(at.drawn_by)[i] = host<int32_t>(at.snapshot_slots)[i] = -1;
    host<int64_t>(at.out_slots)[i] = -1;
  }
  for (int32_t i = filled.logit_rows; i < padded.logit_rows; ++i) {
    host<int32_t>(at.logit_rows)[i] = i;
  }
  for (int32_t i = filled.draw_count; i < padded.draw_count; ++i) {
    host<cuda::Draw>(at.draws)[i].row = -1;
  }
  for (int32_t i = filled.requests; i < padded.requests; ++i) {
    host<int32_t>(at.kv_lens)[i] = host<int32_t>(at.rows)[i] = 0;
    host<int32_t>(at.state_slots)[i] = -1;
    host<int32_t>(at.draft_counts)[i] = host<int32_t>(at.shared_prefix)[i] = 0;
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
                                       device<int32_t>(at.places),
                                       device<int64_t>(at.out_slots),
                                       table_.data<int32_t>(),
                                       table_stride_,
                                       device<int32_t>(at.drawn_by),
                                       drawn_.model,
                                       device<int32_t>(at.tokens),
                                       size.tokens};
  recorder_.record(params, stream);
}

void CudaBatch::draw(const PassSize& size, const LogitRows& rows, Stream stream) const {
  const cuda::Draw* const draws = host<cuda::Draw>(layout(size.tokens).draws);
  draw({draws, static_cast<size_t>(size.draw_count)}, size, rows, stream, false);
}

void CudaBatch::draw_masked(const PassSize& size, const LogitRows& rows, Stream stream) const {
  draw(masked_.list(), size, rows, stream, true);
}

void CudaBatch::draw(std::span<const cuda::Draw> list, const PassSize& size, const LogitRows& rows,
                     Stream stream, bool masked) const {
  size_t first = 0;
  if (rows.first > 0 || rows.count < size.logit_rows) {
    const auto is_here = [&](const cuda::Draw& draw) {
      return draw.row >= rows.first && draw.row < rows.first + rows.count;
    };
    const auto begin = std::ranges::find_if(list, is_here);
    const auto last = std::find_if(list.rbegin(), list.rend(), is_here);
    if (begin == list.end()) return;
    first = static_cast<size_t>(begin - list.begin());
    list = list.subspan(first, static_cast<size_t>(list.rend() - last) - first);
  }
  cuda::DrawParams params{
      .logits = rows.data - int64_t{rows.first} * rows.vocabulary,
      .stride = rows.vocabulary,
      .draws = device<cuda::Draw>(layout(size.tokens).draws) + first,
      .tokens = drawn_.model + own_list_ + first,
      .vocabulary = rows.vocabulary,
      .likeliest_count = static_cast<int32_t>(likeliest_count_),
      .likeliest = likeliest_.data<cuda::LikelyToken>() + first * likeliest_count_};
  if (masked) masked_.set(first, params);
  sampling_.draw(params, static_cast<int32_t>(list.size()), stream);
}

void CudaBatch::return_drawn(const PassSize& size, Stream stream) {
  int32_t* const to = drawn_host_.data<int32_t>() + place_ * static_cast<size_t>(few_tokens_);
  const auto count = static_cast<size_t>(size.draw_count);
  gpu::copy_to_host(to, drawn_.model + own_list_, count * sizeof(int32_t), stream);
  if (likeliest_count_ == 0) return;
  const size_t row = likeliest_count_ * sizeof(TokenLogprob);
  std::byte* const likeliest = likeliest_host_.data<std::byte>();
  gpu::copy_to_host(likeliest + place_ * static_cast<size_t>(few_tokens_) * row, likeliest_.data(),
                    count * row, stream);
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
  // Bounds of the requests would not hold for other replays.
  if (size.mode != ForwardMode::decode && !size.padded) {
    view.hints.host_q_lens = std::span(q_lens_).first(requests);
    view.hints.host_kv_lens = {host<int32_t>(at.kv_lens), requests};
  }
  view.q_indptr = {device<int32_t>(at.q_indptr), requests + 1};
  view.kv_lens = {device<int32_t>(at.kv_lens), requests};
  view.request_rows = {device<int32_t>(at.rows), requests};
  view.table = {.entries = table_.data<int32_t>(), .stride = table_stride_, .rows = table_rows_};
  view.out_slots = {device<int64_t>(at.out_slots), static_cast<size_t>(size.tokens)};
  view.linear.state_slots = {device<int32_t>(at.state_slots), requests};
  if (size.snapshots) {
    view.linear.snapshot_slots = {device<int32_t>(at.snapshot_slots),
                                  static_cast<size_t>(size.tokens)};
  }
  if (size.kept_drafts) view.linear.draft_counts = {device<int32_t>(at.draft_counts), requests};
  if (size.trees) {
    const auto tokens = static_cast<size_t>(size.tokens);
    view.positions = {device<int32_t>(at.positions), tokens};
    view.masks.tree.ancestors = {device<uint64_t>(at.ancestors), tokens};
  }
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
          {device<int32_t>(at.logit_rows), static_cast<size_t>(size.logit_rows)},
          {device<int64_t>(at.out_slots), tokens},
          {device<int32_t>(at.features), tokens}};
}

}  // namespace fovea
