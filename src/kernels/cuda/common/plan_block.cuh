// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fovea::kernels::cuda {

constexpr int kPlanThreads = 256;  // threads of a block that plans softmax attention

}  // namespace fovea::kernels::cuda
