// SPDX-License-Identifier: Apache-2.0
// Notes the features of a pass, see FeatureTap. Only enqueues work on the device.
#pragma once

#include <cstdint>
#include <span>

#include "model/layers.h"
#include "model/model.h"

namespace fovea {

class TapRecorder {
 public:
  // Throws Error{invalid_argument} if the tap does not fit the model.
  void set(FeatureTap tap, const ModelInfo& info);
  explicit operator bool() const { return !tap_.layers.empty(); }

  // Takes the scratch of passes of up to `rows` tokens.
  void take(Arena& arena, int64_t rows);
  // Notes the residual stream x [rows, hidden] before a layer, if the tap names it.
  void note(ModelDevice& device, size_t layer, float* x, int64_t rows) const;
  // Stores the features of all rows by their slots.
  void store(ModelDevice& device, std::span<const int64_t> slots) const;

 private:
  FeatureTap tap_;
  int32_t hidden_ = 0;
  Rows streams_;   // [rows, layers x hidden]
  Rows features_;  // [rows, width], f32
};

}  // namespace fovea
