// SPDX-License-Identifier: Apache-2.0
#include "model/feature_tap.h"

#include <utility>

#include "core/check.h"

namespace fovea {

void TapRecorder::set(FeatureTap tap, const ModelInfo& info) {
  for (const int32_t layer : tap.layers) {
    check_argument(layer >= 0 && layer < info.layers,
                   "the tap takes the stream before layer {}, must be in [0, {})", layer,
                   info.layers);
  }
  const int64_t width = static_cast<int64_t>(tap.layers.size()) * info.hidden;
  check_argument(width == 0 || tap.projection.k == width,
                 "the tap's projection has {} inputs, must have {}", tap.projection.k, width);
  tap_ = std::move(tap);
  hidden_ = info.hidden;
}

void TapRecorder::take(Arena& arena, int64_t rows) {
  if (!*this) return;
  streams_ = arena.rows(rows, takes_last() ? hidden_ : tap_.projection.k);
  if (!takes_last()) features_ = arena.float_rows(rows, width());
}

void TapRecorder::note(ModelDevice& device, size_t layer, float* x, int64_t rows) const {
  for (size_t i = 0; i < tap_.layers.size(); ++i) {
    if (static_cast<size_t>(tap_.layers[i]) != layer) continue;
    copy(device, {}, x, from_column(streams_, static_cast<int64_t>(i) * hidden_), rows);
  }
}

void TapRecorder::note_last(ModelDevice& device, const Norm& norm, float* x, int64_t rows) const {
  if (takes_last()) copy(device, norm, x, streams_, rows);
}

void TapRecorder::copy(ModelDevice& device, const Norm& norm, float* x, Rows out,
                       int64_t rows) const {
  ResidualStep step;
  step.x = x;
  step.norm = norm;
  step.normed = out;
  step.rows = rows;
  step.dim = hidden_;
  device.residual(step);
}

void TapRecorder::store(ModelDevice& device, std::span<const int64_t> slots) const {
  if (!*this || tap_.rows == nullptr) return;
  const auto rows = static_cast<int64_t>(slots.size());
  if (!takes_last()) device.linear(tap_.projection, streams_, features_, rows);
  device.store_rows(takes_last() ? streams_ : features_, {tap_.rows, width(), DType::f32},
                    slots.data(), rows, width());
}

}  // namespace fovea
