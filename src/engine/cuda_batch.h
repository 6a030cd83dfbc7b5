// SPDX-License-Identifier: Apache-2.0
// The arrays of passes on a GPU. They are filled in page-locked memory and copied to fixed device
// addresses at once. The page-locked memory is a ring, so that the next pass can be filled while
// the copies of the one before are still to come.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/cache_set.h"
#include "engine/masked_draws.h"
#include "engine/model_runner.h"
#include "engine/pass_arrays.h"
#include "fovea/batch.h"
#include "gpu/gpu.h"
#include "kernels/cuda/portable/layer_ops/launch.h"
#include "kernels/cuda/portable/sampling/launch.h"

namespace fovea {

struct DrawLimits {
  int32_t max_width = 1;  // draws of a part
  int32_t mask_bits = 0;  // tokens that have a bit in masks; 0: no part may be masked
  int32_t likeliest = 0;  // tokens that each draw finds besides its own
  int32_t lists = 1;      // ModelRunnerOptions::drawn_lists
};

class CudaBatch {
 public:
  // Places of the ring: two passes in flight and one that is being filled.
  static constexpr size_t kPlaces = 3;

  // Allocates the arrays, which begin as those of empty requests, and a zeroed copy of the request
  // table on the current GPU. Without lists of its own, it has those of another batch.
  CudaBatch(const BatchLimits& limits, const RequestTable& table, int sm,
            const DrawLimits& draws = {}, const DrawnLists& drawn = {});

  // Fills the arrays in the next place of the ring, whose last pass must have ended, and returns
  // the sizes of the parts. Throws Error{invalid_argument} if they exceed the limits.
  PassSize fill(std::span<const PassPart> parts, RequestTable& table);
  // Makes the next fill() use this place again. The pass in it must have ended.
  void step_back() { place_ = (place_ + kPlaces - 1) % kPlaces; }
  // Returns the place that was filled last.
  size_t place() const { return place_; }
  // [max_requests] shared prefixes of the pass filled last, see BatchHints. `tokens` is its number
  // of tokens.
  std::span<int32_t> shared_prefix(int32_t tokens) const {
    return {host<int32_t>(layout(tokens).shared_prefix), static_cast<size_t>(limits_.max_requests)};
  }
  // Extends the filled pass to a larger size with requests and tokens of length 0. The larger size
  // has at most max_width tokens for each of max_requests.
  void pad(const PassSize& filled, const PassSize& padded);
  // Enqueues the copies of the arrays, and of entries before the new tokens that changed in the
  // parts' rows of the request table.
  void upload(const PassSize& size, std::span<const PassPart> parts, RequestTable& table,
              Stream stream);

  // Enqueues the kernel that enters the new tokens' slots in the copy of the request table, and
  // drawn tokens in the tokens of the pass.
  void record_slots(const PassSize& size, Stream stream) const;

  // Rows of logits of the pass filled last.
  struct LogitRows {
    float* data = nullptr;  // [count, vocabulary] on the GPU
    int32_t vocabulary = 0;
    int32_t first = 0, count = 0;  // the row at `data`, and the number of rows there
  };
  // Enqueues the listed draws from these rows. If they are not all rows of the pass, only the draws
  // of these rows are enqueued; their number is taken from host memory, which no graph may do.
  void draw(const PassSize& size, const LogitRows& rows, Stream stream) const;
  // Returns the number of draws of the pass filled last that wait for masks; draw() leaves them
  // out.
  size_t masked_draws() const { return masked_.waiting(); }
  // Enqueues the copies of the masks of these draws. The passes before must have ended.
  void upload_masks(std::span<const grammar::TokenMask> masks, Stream stream) {
    masked_.upload(masks, stream);
  }
  // Enqueues those of them that draw from these rows, whose forbidden tokens lose their logits.
  void draw_masked(const PassSize& size, const LogitRows& rows, Stream stream) const;
  // Enqueues the copy of the drawn tokens of the pass filled last to its place in host memory.
  void return_drawn(const PassSize& size, Stream stream);
  // Returns the token of a draw of the pass in this place; meaningless if it draws nothing, -1 if
  // its logits are no distribution. Valid once the copy has ended.
  int32_t drawn(size_t place, size_t draw) const {
    return drawn_host_.data<int32_t>()[place * static_cast<size_t>(few_tokens_) + draw];
  }
  // Likewise the likeliest tokens of its row.
  std::span<const TokenLogprob> likeliest(size_t place, size_t draw) const {
    const size_t row = place * static_cast<size_t>(few_tokens_) + draw;
    return {likeliest_host_.data<TokenLogprob>() + row * likeliest_count_, likeliest_count_};
  }
  const DrawnLists& drawn_lists() const { return drawn_; }
  const void* draws(const PassSize& size) const {
    return device<kernels::cuda::Draw>(layout(size.tokens).draws);
  }

  // Returns the batch as the device sees it, at addresses that depend on its size alone. Bounds of
  // the requests' lengths, which decode passes do not use, are those of the pass filled last.
  BatchView view(const PassSize& size) const;
  ModelInputs inputs(const PassSize& size) const;
  size_t bytes() const {
    return arrays_.bytes() + table_.bytes() + lists_.bytes() + likeliest_.bytes() + masked_.bytes();
  }
  // Returns the bytes that the arrays take, for a table with a row for each request and the
  // reserved one. Needs no GPU.
  static size_t bytes(const BatchLimits& limits, const DrawLimits& draws = {});

 private:
  // Offsets in bytes into the blocks of both host and device. Passes of up to few_tokens() tokens,
  // all those with graphs among them, have arrays of their own, because all arrays of a layout are
  // copied.
  struct Layout {
    size_t begin, tokens, positions, logit_rows, features, places, ancestors, token_rows, drawn_by,
        out_slots, snapshot_slots, q_indptr, kv_lens, rows, draft_counts, state_slots,
        shared_prefix, draws, end;
  };
  struct Layouts {
    Layout few, many;
  };
  // Returns the max tokens, and draws, of decode steps, of requests with max_width tokens each, and
  // of chunks with graphs.
  static int32_t few_tokens(const BatchLimits& limits, int32_t max_width);
  static Layout layout_from(size_t begin, const BatchLimits& limits, int32_t max_tokens,
                            int32_t max_draws);
  static Layouts layouts(const BatchLimits& limits, int32_t max_width);
  const Layout& layout(int32_t tokens) const { return tokens <= few_tokens_ ? at_.few : at_.many; }
  int32_t fill_draws(std::span<const PassPart> parts, const Layout& at);
  void draw(std::span<const kernels::cuda::Draw> list, const PassSize& size, const LogitRows& rows,
            Stream stream, bool masked) const;
  void clear(const Layout& at, int32_t max_tokens);
  void pad(const Layout& at, const PassSize& filled, const PassSize& padded);
  template <typename T>
  T* host(size_t offset) const {
    return reinterpret_cast<T*>(pinned_.data<std::byte>() + place_ * at_.many.end + offset);
  }
  template <typename T>
  T* device(size_t offset) const {
    return reinterpret_cast<T*>(arrays_.data<std::byte>() + offset);
  }

  kernels::cuda::SlotRecorder recorder_;
  kernels::cuda::Sampling sampling_;
  BatchLimits limits_;
  int32_t few_tokens_;
  Layouts at_;
  int32_t table_rows_;
  int64_t table_stride_;
  size_t place_ = 0;
  gpu::PinnedBuffer pinned_;      // [kPlaces] blocks
  std::vector<int32_t> q_lens_;   // [max_requests]
  gpu::PinnedBuffer drawn_host_;  // [kPlaces, few_tokens]
  gpu::DeviceBuffer lists_;       // [DrawLimits::lists, few_tokens]
  DrawnLists drawn_;
  // Offsets from DrawnLists::model to the list of this batch, and to that of the other one.
  int32_t own_list_, other_list_;
  size_t likeliest_count_;
  gpu::PinnedBuffer likeliest_host_;  // [kPlaces, few_tokens, likeliest_count]
  gpu::DeviceBuffer likeliest_;       // [few_tokens, likeliest_count]
  gpu::DeviceBuffer arrays_;
  gpu::DeviceBuffer table_;  // [max_requests, max_context]
  MaskedDraws masked_;
};

}  // namespace fovea
