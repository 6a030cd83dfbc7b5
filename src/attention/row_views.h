// SPDX-License-Identifier: Apache-2.0
// Parts of a layer's rows as arrays of their own. Touches no data, so it serves both devices.
#pragma once

#include <cstdint>

#include "fovea/attention_backend.h"
#include "fovea/attention_spec.h"
#include "fovea/tensor.h"

namespace fovea {

// The same array from a later token or dim on.
HeadRows rows_from(const HeadRows& rows, int64_t token, int64_t dim = 0);
// From a later head on.
HeadRows from_head(const HeadRows& rows, int64_t head);

// What has_rope turns: q; of kind mla its rotary part, which is q_rope or the end of q.
HeadRows rotary_queries(const LayerTensors& layer, const AttentionSpec& spec);

}  // namespace fovea
