// SPDX-License-Identifier: Apache-2.0
#include "model/decoder.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "model/feature_tap.h"
#include "model/shard.h"

namespace fovea {
namespace {

// Number of rows of a feed-forward block that are computed at once. This bounds the scratch between
// its matrices, which is several times as wide as the residual stream. With this many rows, reading
// the weights takes only a small part of the time.
constexpr int64_t kFeedRows = 8192;
// Numbers of rows whose logits ranks exchange at once, which bound the memory for it. A GPU reads
// the head anew for each of them.
constexpr int64_t kHostGatheredRows = 16, kGpuGatheredRows = 64;

class DecoderModel : public Model {
 public:
  explicit DecoderModel(DecoderParts parts) : parts_(std::move(parts)) {}

  const ModelInfo& info() const override { return parts_.info; }
  ModelDevice& device() const override { return *parts_.device; }
  EmbeddingTable embedding() const override {
    return {parts_.embedding, parts_.embedding_dtype, parts_.embedding_factor};
  }
  Linear head() const override { return parts_.head; }
  void set_tap(FeatureTap tap) override { tap_.set(std::move(tap), parts_.info); }
  size_t weight_bytes() const override {
    const bool mapped = parts_.device->kind() == DeviceKind::cpu;
    return parts_.device->weight_bytes() + (mapped ? parts_.checkpoint->bytes() : 0);
  }
  size_t activation_bytes(int32_t max_tokens) const override;
  size_t position_bytes(int32_t max_context) const override;
  void reserve(int32_t max_tokens, int32_t max_context) override;
  void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends) override;
  void logits(int64_t first_row, std::span<float> logits) override;

 private:
  // x: residual stream. normed: input of a block. branch: its output. All are [rows, hidden].
  // squares: those of norms that products begin and end, for up to kMaxJoinedRows rows.
  struct Residual {
    float* x;
    Rows normed;
    float* branch;
    float* squares;
  };
  Residual take_residual(Arena& arena, int64_t rows) const;
  float* take_gathered(Arena& arena) const;
  size_t scratch_bytes(int64_t rows) const;  // scratch of the block that needs the largest
  void check_sizes(const ModelInputs& inputs, size_t backends) const;
  void check_values(const ModelInputs& inputs) const;
  void run_mixer(Pass& pass, const Block& block) const;
  void run_feed(Pass& pass, const Block& block) const;
  void step(const Pass& pass, const Norm* branch_norm, const Norm* norm) const;
  bool joins(const Block& from, const Norm& out_norm, const Block& to, const Norm& norm,
             int64_t rows) const;
  JoinedSteps joined_steps(const Pass& pass, const Norm* before, const Norm* after) const;
  void run_layers(Pass& pass, std::span<const int32_t> logit_rows);
  void keep_rows(std::span<const int32_t> rows);
  int64_t gathered_rows() const {
    return parts_.device->kind() == DeviceKind::cpu ? kHostGatheredRows : kGpuGatheredRows;
  }
  void gather_logits(int64_t first_row, std::span<float> logits);
  Arena arena(std::span<std::byte> memory = {}) const {
    return Arena(parts_.device->activation_dtype(), memory);
  }

  DecoderParts parts_;
  TapRecorder tap_;
  int32_t max_tokens_ = 0;
  int32_t max_context_ = 0;
  int64_t logit_rows_ = 0;  // logit rows of the last pass
  std::shared_ptr<std::byte> memory_;
  Residual stream_{};
  float* gathered_ = nullptr;  // logits of this rank, then of all; null without ranks
  std::span<std::byte> scratch_;
};

DecoderModel::Residual DecoderModel::take_residual(Arena& arena, int64_t rows) const {
  const int64_t hidden = parts_.info.hidden;
  return {.x = arena.floats(rows * hidden),
          .normed = arena.rows(rows, hidden),
          .branch = arena.floats(rows * hidden),
          .squares = arena.floats(std::min(rows, kMaxJoinedRows) * sums_of_squares(hidden))};
}

// Returns room for the logits of gathered_rows() rows, as one rank sends and all receive them.
float* DecoderModel::take_gathered(Arena& arena) const {
  const Communicator* const ranks = parts_.device->ranks();
  if (ranks == nullptr) return nullptr;
  return arena.floats(gathered_rows() * ceil_div(parts_.info.vocabulary, ranks->size()) *
                      (ranks->size() + 1));
}

size_t DecoderModel::scratch_bytes(int64_t rows) const {
  size_t max_bytes = 0;
  for (const DecoderLayer& layer : parts_.layers) {
    for (const auto& [block, at_a_time] :
         {std::pair(layer.mixer.get(), rows), {layer.feed.get(), std::min(rows, kFeedRows)}}) {
      if (block == nullptr) continue;
      Arena counter = arena();
      block->take_scratch(counter, at_a_time);
      max_bytes = std::max(max_bytes, counter.used());
    }
  }
  return max_bytes;
}

size_t DecoderModel::position_bytes(int32_t max_context) const {
  size_t bytes = 0;
  for (const auto& rotary : parts_.rotary_tables)
    bytes += rotary->bytes(*parts_.device, max_context);
  return bytes;
}

size_t DecoderModel::activation_bytes(int32_t max_tokens) const {
  check_argument(max_tokens > 0, "max_tokens is {}, must be positive", max_tokens);
  Arena counter = arena();
  take_residual(counter, max_tokens);
  TapRecorder(tap_).take(counter, max_tokens);
  take_gathered(counter);
  return counter.used() + scratch_bytes(max_tokens);
}

void DecoderModel::reserve(int32_t max_tokens, int32_t max_context) {
  check_argument(max_context > 0 && max_context <= parts_.info.max_context,
                 "max_context is {}, must be in [1, {}]", max_context, parts_.info.max_context);
  const size_t bytes = activation_bytes(max_tokens);
  memory_ = parts_.device->allocate(bytes);
  const std::span<std::byte> memory(memory_.get(), bytes);
  Arena taken = arena(memory);
  stream_ = take_residual(taken, max_tokens);
  tap_.take(taken, max_tokens);
  gathered_ = take_gathered(taken);
  scratch_ = memory.subspan(taken.used());
  max_tokens_ = max_tokens;
  max_context_ = max_context;
  for (const auto& rotary : parts_.rotary_tables) rotary->make(*parts_.device, max_context);
}

void DecoderModel::check_sizes(const ModelInputs& inputs, size_t backends) const {
  const ModelInfo& info = parts_.info;
  const size_t rows = inputs.tokens.size();
  check_argument(rows <= static_cast<size_t>(max_tokens_), "tokens holds {}, reserved are {}", rows,
                 max_tokens_);
  check_argument(inputs.positions.size() == rows,
                 "positions holds {}, must hold {}, as tokens does", inputs.positions.size(), rows);
  check_argument(!tap_ || inputs.slots.size() == rows,
                 "slots holds {}, must hold {}, as tokens does", inputs.slots.size(), rows);
  check_argument(inputs.logit_rows.size() <= rows, "logit_rows holds {}, but there are {} tokens",
                 inputs.logit_rows.size(), rows);
  check_argument(backends == info.groups.size(), "backends holds {}, the model has {} layer groups",
                 backends, info.groups.size());
}

void DecoderModel::check_values(const ModelInputs& inputs) const {
  const size_t rows = inputs.tokens.size();
  for (const int32_t position : inputs.positions) {
    check_argument(position >= 0 && position < max_context_,
                   "positions holds {}, must be in [0, {})", position, max_context_);
  }
  for (const int32_t row : inputs.logit_rows) {
    check_argument(row >= 0 && static_cast<size_t>(row) < rows,
                   "logit_rows holds {}, must be in [0, {})", row, rows);
  }
}

void DecoderModel::run_mixer(Pass& pass, const Block& block) const {
  pass.arena = arena(scratch_);
  block.forward(pass, stream_.normed, {stream_.branch, parts_.info.hidden, DType::f32});
}

// A feed-forward block uses neither positions nor other rows, so rows can be processed in pieces.
void DecoderModel::run_feed(Pass& pass, const Block& block) const {
  const int64_t rows = pass.rows;
  const Rows branch{stream_.branch, parts_.info.hidden, DType::f32};
  for (int64_t begin = 0; begin < rows; begin += kFeedRows) {
    pass.rows = std::min(kFeedRows, rows - begin);
    pass.arena = arena(scratch_);
    block.forward(pass, from_row(stream_.normed, begin), from_row(branch, begin));
  }
  pass.rows = rows;
}

// Computes x += branch_norm(branch) and normed = norm(x). Skips a step whose norm is null. Each
// rank has computed its branch with its own heads or columns.
void DecoderModel::step(const Pass& pass, const Norm* branch_norm, const Norm* norm) const {
  ResidualStep step;
  step.x = stream_.x;
  if (branch_norm != nullptr) {
    step.branch = stream_.branch;
    step.is_part = parts_.device->ranks() != nullptr;
    step.branch_norm = *branch_norm;
    step.branch_factor = parts_.branch_factor;
  }
  if (norm != nullptr) {
    step.norm = *norm;
    step.normed = stream_.normed;
  }
  step.rows = pass.rows;
  step.dim = parts_.info.hidden;
  parts_.device->residual(step);
}

// Returns true if the block `from` can add its result to x and begin the norm of the block `to`.
// Among ranks it cannot, because its result is only a part of the sum.
bool DecoderModel::joins(const Block& from, const Norm& out_norm, const Block& to, const Norm& norm,
                         int64_t rows) const {
  const ModelDevice& device = *parts_.device;
  return device.ranks() == nullptr && rows <= kMaxJoinedRows && !out_norm && norm &&
         from.joins_norms(device, rows) && to.joins_norms(device, rows);
}

// Returns the steps of a block whose input lacks the factors of the norm `before`, and which begins
// the norm `after`. Either may be null.
JoinedSteps DecoderModel::joined_steps(const Pass& pass, const Norm* before,
                                       const Norm* after) const {
  JoinedSteps steps;
  if (before != nullptr) steps.before = {stream_.squares, before->epsilon};
  if (after != nullptr) {
    steps.squares = stream_.squares;
    steps.after.x = stream_.x;
    steps.after.branch_factor = parts_.branch_factor;
    steps.after.norm = *after;
    steps.after.normed = stream_.normed;
    steps.after.rows = pass.rows;
    steps.after.dim = parts_.info.hidden;
  }
  return steps;
}

// Sets x[i] = x[rows[i]].
void DecoderModel::keep_rows(std::span<const int32_t> rows) {
  kernels::ExpertRowsParams move;
  move.x = stream_.x;
  move.out = stream_.branch;
  move.x_stride = move.out_stride = parts_.info.hidden;
  move.index = rows.data();
  move.rows = static_cast<int64_t>(rows.size());
  move.dim = parts_.info.hidden;
  parts_.device->gather_rows(move);
  std::swap(stream_.x, stream_.branch);
}

void DecoderModel::forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends) {
  check_sizes(inputs, backends.size());
  ModelDevice& device = *parts_.device;
  if (device.kind() == DeviceKind::cpu) check_values(inputs);
  const int32_t hidden = parts_.info.hidden;
  Pass pass{.backends = backends,
            .positions = inputs.positions.data(),
            .rows = static_cast<int64_t>(inputs.tokens.size()),
            .device = &device,
            .arena = arena()};
  logit_rows_ = static_cast<int64_t>(inputs.logit_rows.size());
  if (pass.rows == 0) return;

  kernels::EmbeddingParams embedding;
  embedding.table = parts_.embedding;
  embedding.dtype = parts_.embedding_dtype;
  embedding.table_rows = parts_.info.vocabulary;
  embedding.ids = inputs.tokens.data();
  embedding.out = stream_.x;
  embedding.rows = pass.rows;
  embedding.dim = hidden;
  embedding.factor = parts_.embedding_factor;
  device.embedding(embedding);

  run_layers(pass, inputs.logit_rows);
  tap_.store(device, inputs.slots);
}

// Blocks add their results to x and begin the norm of the next block themselves where both can. The
// last mixer does not, because the pass goes on with fewer rows.
void DecoderModel::run_layers(Pass& pass, std::span<const int32_t> logit_rows) {
  const Norm* pending = nullptr;  // norm of a branch that is not yet added to x
  bool begun = false;             // the norm of the next mixer has begun
  for (size_t i = 0; i < parts_.layers.size(); ++i) {
    const DecoderLayer& layer = parts_.layers[i];
    const DecoderLayer* const next = i + 1 < parts_.layers.size() ? &layer + 1 : nullptr;
    // Behind the last mixer no step mixes rows, so only rows with logits continue.
    const bool drops_rows = next == nullptr && !tap_.takes_last();
    const bool begins_feed =
        next != nullptr && layer.feed != nullptr &&
        joins(*layer.mixer, layer.mixer_out_norm, *layer.feed, layer.feed_norm, pass.rows);
    if (!begun) step(pass, pending, &layer.mixer_norm);
    tap_.note(*parts_.device, i, stream_.x, pass.rows);
    pass.joined = joined_steps(pass, begun ? &layer.mixer_norm : nullptr,
                               begins_feed ? &layer.feed_norm : nullptr);
    run_mixer(pass, *layer.mixer);
    if (drops_rows) {
      step(pass, &layer.mixer_out_norm, nullptr);
      keep_rows(logit_rows);
      pass.rows = logit_rows_;
      pass.positions = nullptr;
      if (pass.rows == 0) return;
    }
    pending = drops_rows ? nullptr : &layer.mixer_out_norm;
    begun = false;
    if (layer.feed == nullptr) continue;
    if (!begins_feed) step(pass, pending, &layer.feed_norm);
    begun = next != nullptr &&
            joins(*layer.feed, layer.feed_out_norm, *next->mixer, next->mixer_norm, pass.rows);
    pass.joined = joined_steps(pass, begins_feed ? &layer.feed_norm : nullptr,
                               begun ? &next->mixer_norm : nullptr);
    run_feed(pass, *layer.feed);
    pending = &layer.feed_out_norm;
  }
  if (tap_.takes_last()) {
    step(pass, pending, nullptr);
    tap_.note_last(*parts_.device, parts_.final_norm, stream_.x, pass.rows);
    keep_rows(logit_rows);
    pass.rows = logit_rows_;
    pending = nullptr;
  }
  if (pass.rows > 0) step(pass, pending, &parts_.final_norm);
}

void DecoderModel::logits(int64_t first_row, std::span<float> logits) {
  const int64_t width = parts_.info.vocabulary;
  const auto count = static_cast<int64_t>(logits.size());
  check_argument(count % width == 0, "logits holds {} floats, must hold rows of {}", count, width);
  const int64_t rows = count / width;
  check_argument(first_row >= 0 && first_row <= logit_rows_ && rows <= logit_rows_ - first_row,
                 "logits of rows [{}, {}) were requested, the pass has {}", first_row,
                 first_row + rows, logit_rows_);
  if (rows == 0) return;
  ModelDevice& device = *parts_.device;
  if (device.ranks() != nullptr) {
    gather_logits(first_row, logits);
  } else {
    device.linear(parts_.head, from_row(stream_.normed, first_row),
                  {logits.data(), width, DType::f32}, rows);
  }
  if (parts_.logit_cap > 0) device.soft_cap(logits.data(), parts_.logit_cap, count);
  // On the CPU the weights are in the mapped files.
  if (device.kind() == DeviceKind::cpu) parts_.checkpoint->check_intact();
}

// Each rank computes the logits of its part of the vocabulary.
void DecoderModel::gather_logits(int64_t first_row, std::span<float> logits) {
  const int size = parts_.device->ranks()->size();
  const int64_t width = parts_.info.vocabulary, part = ceil_div<int64_t>(width, size);
  const auto rows = static_cast<int64_t>(logits.size()) / width;
  float* const all = gathered_ + gathered_rows() * part;
  for (int64_t begin = 0; begin < rows; begin += gathered_rows()) {
    const int64_t count = std::min(gathered_rows(), rows - begin);
    if (parts_.head.n > 0) {
      parts_.device->linear(parts_.head, from_row(stream_.normed, first_row + begin),
                            {gathered_, part, DType::f32}, count);
    }
    parts_.device->gather(gathered_, all, static_cast<size_t>(count * part) * sizeof(float));
    for (int rank = 0; rank < size; ++rank) {
      const ShardRange own = shard_range(width, size, rank);
      parts_.device->copy_rows({all + rank * count * part, part, DType::f32},
                               {logits.data() + begin * width + own.begin, width, DType::f32},
                               count, own.count);
    }
  }
}

}  // namespace

std::unique_ptr<Model> make_decoder(DecoderParts parts) {
  parts.checkpoint->check_intact();
  for (LayerGroup& group : parts.info.groups) {
    group.spec.q_dtype = parts.device->activation_dtype();
    if (shares_context(group.spec, *parts.device)) {
      group.context_ranks = parts.device->ranks()->size();
    }
  }
  return std::make_unique<DecoderModel>(std::move(parts));
}

}  // namespace fovea
