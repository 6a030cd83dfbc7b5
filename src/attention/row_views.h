// SPDX-License-Identifier: Apache-2.0
// Views of parts of a layer's rows. They read no data, so they serve both devices.
#pragma once

#include <cstdint>

#include "fovea/attention_backend.h"
#include "fovea/attention_spec.h"
#include "fovea/tensor.h"

namespace fovea {

// Returns the rows from a token and a dim on.
HeadRows rows_from(const HeadRows& rows, int64_t token, int64_t dim = 0);
// Returns the rows from a head on.
HeadRows from_head(const HeadRows& rows, int64_t head);

// Returns the part of q that has_rope rotates: q itself; for mla q_rope, or the end of q.
HeadRows rotary_queries(const LayerTensors& layer, const AttentionSpec& spec);

}  // namespace fovea
