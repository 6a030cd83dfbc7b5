// SPDX-License-Identifier: Apache-2.0
// Reads rotary frequencies from `rope_parameters` and from the older fields `rope_theta`,
// `rope_scaling`, `partial_rotary_factor` and `original_max_position_embeddings`, with the
// precedence and the required fields of transformers 5.24.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/layer_ops.h"
#include "model/json_object.h"

namespace fovea {

// Values of an architecture for fields that the config lacks.
struct RopeDefaults {
  double theta = 10000;                         // if rope_theta is missing
  std::string_view theta_field = "rope_theta";  // older field for theta
  bool rotates_parts = false;                   // allows partial_rotary_factor below 1
  double partial_rotary_factor = 1;             // if the field is missing
  // Used if the top-level original_max_position_embeddings is missing; 0 selects the field of
  // rope_parameters, or max_position_embeddings.
  int32_t original_max_positions = 0;
  bool yarn_is_longrope = false;     // "su" and "yarn" are older names of "longrope" (Phi-3)
  bool has_rope_scaling = true;      // if false, rope_scaling describes other layers
  std::string_view parameters = {};  // JSON object used if rope_parameters is missing
};

// head_dim: dims of a head, of which the fraction partial_rotary_factor rotates.
// layer_type: key of these layers in rope_parameters, or "" if all layers share one set of values.
// Throws errors that name the field: Error{corrupt_file} if the reference refuses its value or it
// is out of range, Error{unsupported} for an unknown type of scaling.
kernels::RopeSpec read_rope(const JsonObject& config, int32_t head_dim,
                            const RopeDefaults& defaults = {}, std::string_view layer_type = {});

}  // namespace fovea
