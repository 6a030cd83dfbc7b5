// SPDX-License-Identifier: Apache-2.0
// Rotary frequencies from `rope_parameters` and from the older fields `rope_theta`, `rope_scaling`,
// `partial_rotary_factor` and `original_max_position_embeddings`, with the precedence and the
// required fields of transformers 5.24.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/layer_ops.h"
#include "model/config.h"

namespace fovea {

// The values an architecture takes where its config says nothing.
struct RopeDefaults {
  double theta = 10000;                         // without rope_theta
  std::string_view theta_field = "rope_theta";  // older field that holds theta
  bool rotates_parts = false;                   // partial_rotary_factor below 1 is legal
  double partial_rotary_factor = 1;             // without the field
  // Without the top-level original_max_position_embeddings; 0: the field of rope_parameters, or
  // max_position_embeddings.
  int32_t original_max_positions = 0;
  bool yarn_is_longrope = false;     // "su" and "yarn" are older names of "longrope" (Phi-3)
  bool has_rope_scaling = true;      // false: rope_scaling describes other layers
  std::string_view parameters = {};  // JSON object that replaces a missing rope_parameters
};

// head_dim: dims of a head, of which the share partial_rotary_factor rotates.
// layer_type: the key of rope_parameters under which the values of these layers are ("" where one
// set of values serves all layers).
// Errors name the field: Error{corrupt_file} where the reference refuses it or it is out of range,
// Error{unsupported} for a type of scaling that is not implemented.
kernels::RopeSpec read_rope(const Config& config, int32_t head_dim,
                            const RopeDefaults& defaults = {}, std::string_view layer_type = {});

}  // namespace fovea
