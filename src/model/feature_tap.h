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
  explicit operator bool() const { return hidden_ > 0; }
  // Returns true if it notes the result of the final norm.
  bool takes_last() const { return hidden_ > 0 && tap_.layers.empty(); }

  // Takes the scratch of passes of up to `rows` tokens.
  void take(Arena& arena, int64_t rows);
  // Notes the residual stream x [rows, hidden] before a layer, if the tap names it.
  void note(ModelDevice& device, size_t layer, float* x, int64_t rows) const;
  // Notes norm(x) after the last layer, if the tap takes it.
  void note_last(ModelDevice& device, const Norm& norm, float* x, int64_t rows) const;
  // Stores the features of all rows by their slots.
  void store(ModelDevice& device, std::span<const int64_t> slots) const;

 private:
  int64_t width() const { return takes_last() ? hidden_ : tap_.projection.n; }
  void copy(ModelDevice& device, const Norm& norm, float* x, Rows out, int64_t rows) const;

  FeatureTap tap_;
  int32_t hidden_ = 0;  // 0: no tap
  Rows streams_;        // [rows, layers x hidden]
  Rows features_;       // [rows, width], f32
};

}  // namespace fovea
