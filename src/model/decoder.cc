// SPDX-License-Identifier: Apache-2.0
#include "model/decoder.h"

#include <algorithm>

#include "core/check.h"

namespace fovea {
namespace {

class DecoderModel : public Model {
 public:
  explicit DecoderModel(DecoderParts parts) : parts_(std::move(parts)) {}

  const ModelInfo& info() const override { return parts_.info; }
  ModelDevice& device() const override { return *parts_.device; }
  size_t weight_bytes() const override {
    const bool mapped = parts_.device->kind() == DeviceKind::cpu;
    return parts_.device->weight_bytes() + (mapped ? parts_.checkpoint->bytes() : 0);
  }
  size_t reserve(int32_t max_tokens, int32_t max_context) override;
  void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends,
               std::span<float> logits) override;

 private:
  // x: the residual stream. normed: input of a block. branch: its output. All [rows, hidden].
  struct Residual {
    float* x;
    Rows normed;
    float* branch;
  };
  Residual take_residual(Arena& arena, int64_t rows) const;
  size_t make_rotary_tables(int32_t positions);
  size_t scratch_bytes(int64_t rows) const;  // of the hungriest block
  void check_sizes(const ModelInputs& inputs, size_t backends, size_t logits) const;
  void check_values(const ModelInputs& inputs) const;
  void run_block(Pass& pass, const Block& block) const;
  void step(const Pass& pass, const Norm* branch_norm, const Norm* norm) const;
  void keep_rows(std::span<const int32_t> rows);
  Arena arena(std::span<std::byte> memory = {}) const {
    return Arena(parts_.device->activation_dtype(), memory);
  }

  DecoderParts parts_;
  int32_t max_tokens_ = 0;
  int32_t max_context_ = 0;
  std::shared_ptr<std::byte> memory_;
  Residual stream_{};
  std::span<std::byte> scratch_;
};

DecoderModel::Residual DecoderModel::take_residual(Arena& arena, int64_t rows) const {
  const int64_t hidden = parts_.info.hidden;
  return {.x = arena.floats(rows * hidden),
          .normed = arena.rows(rows, hidden),
          .branch = arena.floats(rows * hidden)};
}

size_t DecoderModel::scratch_bytes(int64_t rows) const {
  size_t most = 0;
  for (const DecoderLayer& layer : parts_.layers) {
    for (const Block* block : {layer.mixer.get(), layer.feed.get()}) {
      Arena counter = arena();
      block->take_scratch(counter, rows);
      most = std::max(most, counter.used());
    }
  }
  return most;
}

// Returns the bytes of all tables.
size_t DecoderModel::make_rotary_tables(int32_t positions) {
  size_t bytes = 0;
  for (const auto& rotary : parts_.rotary_tables) {
    kernels::RopeTable table = make_rope_table(rotary->spec, positions);
    rotary->view = table.view();
    bytes += (table.cos.size() + table.sin.size()) * sizeof(float);
    rotary->view.cos = parts_.device->place(std::move(table.cos)).data();
    rotary->view.sin = parts_.device->place(std::move(table.sin)).data();
  }
  return bytes;
}

size_t DecoderModel::reserve(int32_t max_tokens, int32_t max_context) {
  check_argument(max_tokens > 0, "max_tokens is {}, must be positive", max_tokens);
  check_argument(max_context > 0 && max_context <= parts_.info.max_context,
                 "max_context is {}, must be in [1, {}]", max_context, parts_.info.max_context);
  Arena counter = arena();
  take_residual(counter, max_tokens);
  const size_t bytes = counter.used() + scratch_bytes(max_tokens);
  memory_ = parts_.device->allocate(bytes);
  const std::span<std::byte> memory(memory_.get(), bytes);
  Arena taken = arena(memory);
  stream_ = take_residual(taken, max_tokens);
  scratch_ = memory.subspan(taken.used());
  max_tokens_ = max_tokens;
  max_context_ = max_context;
  return bytes + make_rotary_tables(max_context);
}

void DecoderModel::check_sizes(const ModelInputs& inputs, size_t backends, size_t logits) const {
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

void DecoderModel::run_block(Pass& pass, const Block& block) const {
  pass.arena = arena(scratch_);
  block.forward(pass, stream_.normed, {stream_.branch, parts_.info.hidden, DType::f32});
}

// x += branch_norm(branch) and normed = norm(x), either where it is not null.
void DecoderModel::step(const Pass& pass, const Norm* branch_norm, const Norm* norm) const {
  ResidualStep step;
  step.x = stream_.x;
  if (branch_norm != nullptr) {
    step.branch = stream_.branch;
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

// x[i] <- x[rows[i]]
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

void DecoderModel::forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends,
                           std::span<float> logits) {
  check_sizes(inputs, backends.size(), logits.size());
  ModelDevice& device = *parts_.device;
  if (device.kind() == DeviceKind::cpu) check_values(inputs);
  const int32_t hidden = parts_.info.hidden;
  Pass pass{.backends = backends,
            .positions = inputs.positions.data(),
            .rows = static_cast<int64_t>(inputs.tokens.size()),
            .device = &device,
            .arena = arena()};
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

  const Norm* pending = nullptr;  // norm of the branch that x still lacks
  for (const DecoderLayer& layer : parts_.layers) {
    step(pass, pending, &layer.mixer_norm);
    run_block(pass, *layer.mixer);
    if (&layer == &parts_.layers.back()) {
      // Rows are independent from here on: only those somebody asked for go on.
      step(pass, &layer.mixer_out_norm, nullptr);
      keep_rows(inputs.logit_rows);
      pass.rows = static_cast<int64_t>(inputs.logit_rows.size());
      pass.positions = nullptr;
      if (pass.rows == 0) return;
      step(pass, nullptr, &layer.feed_norm);
    } else {
      step(pass, &layer.mixer_out_norm, &layer.feed_norm);
    }
    run_block(pass, *layer.feed);
    pending = &layer.feed_out_norm;
  }

  step(pass, pending, &parts_.final_norm);
  device.linear(parts_.head, stream_.normed, {logits.data(), parts_.info.vocabulary, DType::f32},
                pass.rows);
  if (parts_.logit_cap > 0) {
    device.soft_cap(logits.data(), parts_.logit_cap, static_cast<int64_t>(logits.size()));
  }
  // On the CPU the weights are the mapped files.
  if (device.kind() == DeviceKind::cpu) parts_.checkpoint->check_intact();
}

}  // namespace

std::unique_ptr<Model> make_decoder(DecoderParts parts) {
  parts.checkpoint->check_intact();
  for (LayerGroup& group : parts.info.groups) {
    group.spec.q_dtype = parts.device->activation_dtype();
  }
  return std::make_unique<DecoderModel>(std::move(parts));
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
