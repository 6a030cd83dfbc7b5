// SPDX-License-Identifier: Apache-2.0
// The operations of the family.
#pragma once

#include "kernels/accept_drafts.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

enum Op { describe_drafts, accept_tokens, accept_sampled, commit_drafts };

}  // namespace fovea::kernels::cuda
