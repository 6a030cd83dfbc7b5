// SPDX-License-Identifier: Apache-2.0
#include "model/decoder.h"

#include <algorithm>
#include <new>

#include "core/check.h"

namespace fovea {
namespace {

constexpr std::align_val_t kAlignment{64};

struct AlignedDelete {
  void operator()(std::byte* bytes) const { ::operator delete(bytes, kAlignment); }
};

class DecoderModel : public Model {
 public:
  DecoderModel(DecoderParts parts, ThreadPool& threads)
      : parts_(std::move(parts)), threads_(&threads) {}

  const ModelInfo& info() const override { return parts_.info; }
  size_t reserve(int32_t max_tokens) override;
  void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends,
               std::span<float> logits) override;

 private:
  // x: the residual stream. normed: input of a block. branch: its output. All [rows, hidden].
  struct Stream {
    float *x, *normed, *branch;
  };
  Stream take_stream(Arena& arena, int64_t rows) const;
  size_t scratch_bytes(int64_t rows) const;  // of the hungriest block
  void check(const ModelInputs& inputs, size_t backends, size_t logits) const;
  void add_branch(Pass pass, const Norm& in, const Block& block, const Norm& out) const;
  void keep_rows(std::span<const int32_t> rows);

  DecoderParts parts_;
  ThreadPool* threads_;
  int32_t max_tokens_ = 0;
  std::unique_ptr<std::byte, AlignedDelete> memory_;
  Stream stream_{};
  std::span<std::byte> scratch_;
};

DecoderModel::Stream DecoderModel::take_stream(Arena& arena, int64_t rows) const {
  const int64_t count = rows * parts_.info.hidden;
  return {.x = arena.floats(count), .normed = arena.floats(count), .branch = arena.floats(count)};
}

size_t DecoderModel::scratch_bytes(int64_t rows) const {
  size_t most = 0;
  for (const DecoderLayer& layer : parts_.layers) {
    for (const Block* block : {layer.mixer.get(), layer.feed.get()}) {
      Arena counter;
      block->take_scratch(counter, rows);
      most = std::max(most, counter.used());
    }
  }
  return most;
}

size_t DecoderModel::reserve(int32_t max_tokens) {
  check_argument(max_tokens > 0, "max_tokens is {}, must be positive", max_tokens);
  Arena counter;
  take_stream(counter, max_tokens);
  const size_t bytes = counter.used() + scratch_bytes(max_tokens);
  memory_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
  const std::span<std::byte> memory(memory_.get(), bytes);
  Arena arena(memory);
  stream_ = take_stream(arena, max_tokens);
  scratch_ = memory.subspan(arena.used());
  max_tokens_ = max_tokens;
  return bytes;
}

void DecoderModel::check(const ModelInputs& inputs, size_t backends, size_t logits) const {
  const ModelInfo& info = parts_.info;
  const size_t rows = inputs.tokens.size();
  check_argument(rows <= static_cast<size_t>(max_tokens_), "tokens holds {}, reserved are {}", rows,
                 max_tokens_);
  check_argument(inputs.positions.size() == rows,
                 "positions holds {}, must hold {}, as tokens does", inputs.positions.size(), rows);
  check_argument(inputs.logit_rows.size() <= rows, "logit_rows holds {}, but there are {} tokens",
                 inputs.logit_rows.size(), rows);
  check_argument(logits == inputs.logit_rows.size() * static_cast<size_t>(info.vocabulary),
                 "logits holds {} floats, must hold {} rows of {}", logits,
                 inputs.logit_rows.size(), info.vocabulary);
  check_argument(backends == info.groups.size(), "backends holds {}, the model has {} layer groups",
                 backends, info.groups.size());
  for (const int32_t position : inputs.positions) {
    check_argument(position >= 0 && position < info.max_context,
                   "positions holds {}, must be in [0, {})", position, info.max_context);
  }
  for (const int32_t row : inputs.logit_rows) {
    check_argument(row >= 0 && static_cast<size_t>(row) < rows,
                   "logit_rows holds {}, must be in [0, {})", row, rows);
  }
}

void DecoderModel::add_branch(Pass pass, const Norm& in, const Block& block,
                              const Norm& out) const {
  const int64_t hidden = parts_.info.hidden;
  in.apply({stream_.x, hidden, hidden}, {stream_.normed, hidden, hidden}, pass.rows, 1, *threads_);
  pass.arena = Arena(scratch_);
  block.forward(pass, stream_.normed, stream_.branch);
  const kernels::HeadView branch{stream_.branch, hidden, hidden};
  if (out) out.apply(branch, branch, pass.rows, 1, *threads_);
  kernels::add(stream_.x, stream_.branch, pass.rows * hidden, *threads_);
}

// x[i] <- x[rows[i]]
void DecoderModel::keep_rows(std::span<const int32_t> rows) {
  kernels::ExpertRowsParams move;
  move.x = stream_.x;
  move.out = stream_.branch;
  move.x_stride = move.out_stride = parts_.info.hidden;
  move.index = rows.data();
  move.rows = static_cast<int64_t>(rows.size());
  move.dim = parts_.info.hidden;
  kernels::gather_rows(move, *threads_);
  std::swap(stream_.x, stream_.branch);
}

void DecoderModel::forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends,
                           std::span<float> logits) {
  check(inputs, backends.size(), logits.size());
  const int32_t hidden = parts_.info.hidden;
  Pass pass{.backends = backends,
            .positions = inputs.positions.data(),
            .rows = static_cast<int64_t>(inputs.tokens.size()),
            .threads = threads_,
            .arena = {}};
  if (pass.rows == 0) return;

  kernels::EmbeddingParams embedding;
  embedding.table = parts_.embedding.data;
  embedding.dtype = parts_.embedding.dtype;
  embedding.table_rows = parts_.info.vocabulary;
  embedding.ids = inputs.tokens.data();
  embedding.out = stream_.x;
  embedding.rows = pass.rows;
  embedding.dim = hidden;
  embedding.factor = parts_.embedding_factor;
  kernels::embedding(embedding, *threads_);

  for (const DecoderLayer& layer : parts_.layers) {
    add_branch(pass, layer.mixer_norm, *layer.mixer, layer.mixer_out_norm);
    if (&layer == &parts_.layers.back()) {
      // Rows are independent from here on: only those somebody asked for go on.
      keep_rows(inputs.logit_rows);
      pass.rows = static_cast<int64_t>(inputs.logit_rows.size());
      pass.positions = nullptr;
      if (pass.rows == 0) return;
    }
    add_branch(pass, layer.feed_norm, *layer.feed, layer.feed_out_norm);
  }

  parts_.final_norm.apply({stream_.x, hidden, hidden}, {stream_.normed, hidden, hidden}, pass.rows,
                          1, *threads_);
  parts_.head.apply({stream_.normed, hidden}, {logits.data(), parts_.info.vocabulary}, pass.rows,
                    *threads_);
  if (parts_.logit_cap > 0) {
    kernels::soft_cap(logits.data(), parts_.logit_cap, static_cast<int64_t>(logits.size()),
                      *threads_);
  }
}

}  // namespace

std::unique_ptr<Model> make_decoder(DecoderParts parts, ThreadPool& threads) {
  return std::make_unique<DecoderModel>(std::move(parts), threads);
}

LayerSlot join_group(ModelInfo& info, int32_t layer, const AttentionSpec& spec,
                     const StateCacheSpec& state) {
  auto group = std::find_if(info.groups.begin(), info.groups.end(),
                            [&](const LayerGroup& g) { return g.spec == spec; });
  if (group == info.groups.end()) {
    group = info.groups.insert(group, LayerGroup{spec, {}, state});
  }
  group->layers.push_back(layer);
  group->state.layers = state.heads > 0 ? static_cast<int32_t>(group->layers.size()) : 0;
  return {static_cast<int32_t>(group - info.groups.begin()),
          static_cast<int32_t>(group->layers.size()) - 1};
}

}  // namespace fovea
