// SPDX-License-Identifier: Apache-2.0
// The masks of a batch in the form that kernels take.
#pragma once

#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "kernels/attention.h"

namespace fovea {

kernels::AttentionMask batch_mask(const BatchView& batch, const AttentionSpec& spec);

}  // namespace fovea
