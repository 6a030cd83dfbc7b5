// SPDX-License-Identifier: Apache-2.0
// Measures what the products and sums of a tensor-parallel decoder take on several GPUs.
#pragma once

#include <cstdint>
#include <vector>

#include "model/device.h"

namespace fovea::bench {

// Time of a layer of Qwen3-8B's shape without its attention: four products, the gates and both
// norms, on one GPU with whole matrices, and on all ranks with their parts and two sums.
struct DecoderLayerTime {
  int32_t rows = 0;
  double one = -1, ranks = -1;  // microseconds
  double worst = 0;             // largest difference of results, relative to their root mean square
};

// Called by all ranks at once; each gets the same number of results.
std::vector<DecoderLayerTime> measure_decoder_layers(const ModelRanks& links, int gpu);

}  // namespace fovea::bench
