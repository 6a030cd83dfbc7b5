// SPDX-License-Identifier: Apache-2.0
#include "model/eagle_head.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "model/eagle_parts.h"

namespace fovea {
namespace {

// Number of rows whose logits over a part of the vocabulary are kept at once.
constexpr int64_t kLogitRows = 64;

class LoadedHead final : public EagleHead {
 public:
  explicit LoadedHead(EagleParts parts) : parts_(std::move(parts)) {}

  const ModelInfo& info() const override { return parts_.info; }
  ModelDevice& device() const override { return *parts_.device; }
  EmbeddingTable embedding() const override { return parts_.embedding; }
  Linear head() const override { return parts_.head; }
  void set_tap(FeatureTap) override {
    fail(ErrorCode::unsupported, "{} is a head, which notes no features", parts_.info.architecture);
  }
  size_t weight_bytes() const override {
    const bool mapped = parts_.device->kind() == DeviceKind::cpu;
    return parts_.device->weight_bytes() + (mapped ? parts_.checkpoint->bytes() : 0);
  }
  size_t activation_bytes(int32_t max_tokens) const override;
  size_t position_bytes(int32_t max_context) const override {
    return parts_.rotary->bytes(*parts_.device, max_context);
  }
  void reserve(int32_t max_tokens, int32_t max_context) override;
  void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends) override;
  void logits(int64_t first_row, std::span<float> logits) override;

  const FeatureTap& tap() const override { return parts_.tap; }
  size_t feature_bytes(int64_t slots, int32_t max_tokens) const override {
    return static_cast<size_t>(slots + max_tokens) * static_cast<size_t>(hidden()) * sizeof(float);
  }
  FeatureTap reserve_features(int64_t slots, int32_t max_tokens) override;

 private:
  struct Buffers {
    float *x, *embedded, *branch;  // [rows, hidden]
    Rows both;                     // [rows, 2 x hidden]
    Rows normed;                   // [rows, hidden]
    Rows part;                     // [kLogitRows, head.n] logits of a part of the vocabulary
  };
  Buffers take(Arena& arena, int64_t rows) const;
  size_t scratch_bytes(int64_t rows) const;
  Arena arena(std::span<std::byte> memory = {}) const {
    return Arena(parts_.device->activation_dtype(), memory);
  }
  int32_t hidden() const { return parts_.info.hidden; }
  void gather(const float* from, const int32_t* index, float* out, int64_t rows) const;
  void step(float* x, float* branch, const Norm& norm, Rows normed, int64_t rows) const;
  void check(const ModelInputs& inputs, size_t backends) const;

  EagleParts parts_;
  int32_t max_tokens_ = 0, max_context_ = 0;
  int64_t logit_rows_ = 0;
  std::shared_ptr<std::byte> memory_, feature_memory_;
  int64_t slots_ = 0;
  Buffers buffers_{};
  std::span<std::byte> scratch_;
};

LoadedHead::Buffers LoadedHead::take(Arena& arena, int64_t rows) const {
  Buffers buffers{};
  for (float** const rows_of : {&buffers.x, &buffers.embedded, &buffers.branch}) {
    *rows_of = arena.floats(rows * hidden());
  }
  buffers.both = arena.rows(rows, int64_t{2} * hidden());
  buffers.normed = arena.rows(rows, hidden());
  if (parts_.columns != nullptr) buffers.part = arena.float_rows(kLogitRows, parts_.head.n);
  return buffers;
}

size_t LoadedHead::scratch_bytes(int64_t rows) const {
  size_t max_bytes = 0;
  for (const Block* block : {parts_.mixer.get(), parts_.feed.get()}) {
    Arena counter = arena();
    block->take_scratch(counter, rows);
    max_bytes = std::max(max_bytes, counter.used());
  }
  return max_bytes;
}

size_t LoadedHead::activation_bytes(int32_t max_tokens) const {
  Arena counter = arena();
  take(counter, max_tokens);
  return counter.used() + scratch_bytes(max_tokens);
}

void LoadedHead::reserve(int32_t max_tokens, int32_t max_context) {
  const size_t bytes = activation_bytes(max_tokens);
  memory_ = parts_.device->allocate(bytes);
  const std::span<std::byte> memory(memory_.get(), bytes);
  Arena taken = arena(memory);
  buffers_ = take(taken, max_tokens);
  scratch_ = memory.subspan(taken.used());
  max_tokens_ = max_tokens;
  max_context_ = max_context;
  parts_.rotary->make(*parts_.device, max_context);
}

FeatureTap LoadedHead::reserve_features(int64_t slots, int32_t max_tokens) {
  const size_t bytes = feature_bytes(slots, max_tokens);
  feature_memory_ = parts_.device->allocate(bytes);
  slots_ = slots;
  FeatureTap tap = parts_.tap;
  tap.rows = reinterpret_cast<float*>(feature_memory_.get());
  return tap;
}

void LoadedHead::check(const ModelInputs& inputs, size_t backends) const {
  const size_t rows = inputs.tokens.size();
  check_argument(rows <= static_cast<size_t>(max_tokens_), "tokens holds {}, reserved are {}", rows,
                 max_tokens_);
  check_argument(inputs.positions.size() == rows && inputs.features.size() == rows,
                 "positions holds {} and features {}, must hold {}, as tokens does",
                 inputs.positions.size(), inputs.features.size(), rows);
  check_argument(inputs.logit_rows.size() <= rows, "logit_rows holds {}, but there are {} tokens",
                 inputs.logit_rows.size(), rows);
  check_argument(backends == 1, "backends holds {}, the head has 1 layer group", backends);
  check_argument(feature_memory_ != nullptr, "the head has no features");
  if (parts_.device->kind() != DeviceKind::cpu) return;
  for (size_t i = 0; i < rows; ++i) {
    check_argument(inputs.positions[i] >= 0 && inputs.positions[i] < max_context_,
                   "positions holds {}, must be in [0, {})", inputs.positions[i], max_context_);
    check_argument(inputs.features[i] >= 0 && inputs.features[i] < slots_ + max_tokens_,
                   "features holds {}, must be in [0, {})", inputs.features[i],
                   slots_ + max_tokens_);
  }
}

void LoadedHead::gather(const float* from, const int32_t* index, float* out, int64_t rows) const {
  kernels::ExpertRowsParams move;
  move.x = from;
  move.out = out;
  move.x_stride = move.out_stride = hidden();
  move.index = index;
  move.rows = rows;
  move.dim = hidden();
  parts_.device->gather_rows(move);
}

void LoadedHead::step(float* x, float* branch, const Norm& norm, Rows normed, int64_t rows) const {
  ResidualStep step;
  step.x = x;
  step.branch = branch;
  step.norm = norm;
  step.normed = normed;
  step.rows = rows;
  step.dim = hidden();
  parts_.device->residual(step);
}

void LoadedHead::forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends) {
  check(inputs, backends.size());
  ModelDevice& device = *parts_.device;
  const auto rows = static_cast<int64_t>(inputs.tokens.size());
  logit_rows_ = static_cast<int64_t>(inputs.logit_rows.size());
  if (rows == 0) return;
  kernels::EmbeddingParams embedding;
  embedding.table = parts_.embedding.rows;
  embedding.dtype = parts_.embedding.dtype;
  embedding.table_rows = parts_.info.vocabulary;
  embedding.ids = inputs.tokens.data();
  embedding.out = buffers_.embedded;
  embedding.rows = rows;
  embedding.dim = hidden();
  embedding.factor = parts_.embedding.factor;
  device.embedding(embedding);
  float* const features = reinterpret_cast<float*>(feature_memory_.get());
  gather(features, inputs.features.data(), buffers_.x, rows);
  step(buffers_.embedded, nullptr, parts_.embedding_norm, buffers_.both, rows);
  step(buffers_.x, nullptr, parts_.hidden_norm, from_column(buffers_.both, hidden()), rows);

  const Rows branch{buffers_.branch, hidden(), DType::f32};
  Pass pass{.backends = backends,
            .positions = inputs.positions.data(),
            .rows = rows,
            .device = &device,
            .arena = arena(scratch_)};
  if (parts_.join) {
    device.linear(parts_.join, buffers_.both, {buffers_.x, hidden(), DType::f32}, rows);
    step(buffers_.x, nullptr, parts_.mixer_norm, buffers_.normed, rows);
  }
  parts_.mixer->forward(pass, parts_.join ? buffers_.normed : buffers_.both, branch);
  step(buffers_.x, buffers_.branch, {}, {}, rows);
  if (logit_rows_ == 0) return;
  float* const kept = buffers_.embedded;
  gather(buffers_.x, inputs.logit_rows.data(), kept, logit_rows_);
  step(kept, nullptr, parts_.feed_norm, buffers_.normed, logit_rows_);
  pass.rows = logit_rows_;
  pass.arena = arena(scratch_);
  parts_.feed->forward(pass, buffers_.normed, branch);
  step(kept, buffers_.branch, parts_.final_norm, buffers_.normed, logit_rows_);
  const Rows made =
      parts_.final_norm_makes_features ? buffers_.normed : Rows{kept, hidden(), DType::f32};
  device.store_rows(made, {features + slots_ * hidden(), hidden(), DType::f32}, nullptr,
                    logit_rows_, hidden());
}

void LoadedHead::logits(int64_t first_row, std::span<float> logits) {
  const int64_t width = parts_.info.vocabulary;
  const auto count = static_cast<int64_t>(logits.size());
  check_argument(count % width == 0, "logits holds {} floats, must hold rows of {}", count, width);
  const int64_t rows = count / width;
  check_argument(first_row >= 0 && first_row <= logit_rows_ && rows <= logit_rows_ - first_row,
                 "logits of rows [{}, {}) were requested, the pass has {}", first_row,
                 first_row + rows, logit_rows_);
  const Rows out{logits.data(), width, DType::f32};
  if (rows > 0 && parts_.columns == nullptr) {
    parts_.device->linear(parts_.head, from_row(buffers_.normed, first_row), out, rows);
  } else {
    for (int64_t begin = 0; begin < rows; begin += kLogitRows) {
      const int64_t some = std::min(kLogitRows, rows - begin);
      parts_.device->linear(parts_.head, from_row(buffers_.normed, first_row + begin),
                            buffers_.part, some);
      parts_.device->spread_columns(buffers_.part, from_row(out, begin), parts_.columns, some,
                                    width);
    }
  }
  if (parts_.device->kind() == DeviceKind::cpu) parts_.checkpoint->check_intact();
}

}  // namespace

std::unique_ptr<EagleHead> make_eagle_head(EagleParts parts) {
  return std::make_unique<LoadedHead>(std::move(parts));
}

}  // namespace fovea
