// SPDX-License-Identifier: Apache-2.0
#include "model/feature_tap.h"

#include <utility>

#include "core/check.h"

namespace fovea {

void TapRecorder::set(FeatureTap tap, const ModelInfo& info) {
  check_argument(!tap.layers.empty(), "the tap names no layers");
  for (const int32_t layer : tap.layers) {
    check_argument(layer >= 0 && layer < info.layers,
                   "the tap takes the stream before layer {}, must be in [0, {})", layer,
                   info.layers);
  }
  const int64_t width = static_cast<int64_t>(tap.layers.size()) * info.hidden;
  check_argument(tap.projection.k == width, "the tap's projection has {} inputs, must have {}",
                 tap.projection.k, width);
  tap_ = std::move(tap);
  hidden_ = info.hidden;
}

void TapRecorder::take(Arena& arena, int64_t rows) {
  if (!*this) return;
  streams_ = arena.rows(rows, tap_.projection.k);
  features_ = arena.float_rows(rows, tap_.projection.n);
}

void TapRecorder::note(ModelDevice& device, size_t layer, float* x, int64_t rows) const {
  for (size_t i = 0; i < tap_.layers.size(); ++i) {
    if (static_cast<size_t>(tap_.layers[i]) != layer) continue;
    ResidualStep copy;
    copy.x = x;
    copy.normed = from_column(streams_, static_cast<int64_t>(i) * hidden_);
    copy.rows = rows;
    copy.dim = hidden_;
    device.residual(copy);
  }
}

void TapRecorder::store(ModelDevice& device, std::span<const int64_t> slots) const {
  if (!*this || tap_.rows == nullptr) return;
  const auto rows = static_cast<int64_t>(slots.size());
  device.linear(tap_.projection, streams_, features_, rows);
  device.store_rows(features_, {tap_.rows, tap_.projection.n, DType::f32}, slots.data(), rows,
                    tap_.projection.n);
}

}  // namespace fovea
