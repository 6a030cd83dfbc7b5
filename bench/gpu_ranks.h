// SPDX-License-Identifier: Apache-2.0
// Measures sums and exchanges over the GPUs of this machine, and the links between them.
#pragma once

#include <cstddef>
#include <vector>

#include "bench/gpu_contexts.h"
#include "bench/gpu_decoder_layers.h"

namespace fovea::bench {

struct RankBenchOptions {
  int ranks = 2;                                                    // GPUs 0 to ranks - 1
  size_t min_bytes = size_t{8} << 10, max_bytes = size_t{4} << 20;  // values of one rank
};

// Times of one sum of f32 in microseconds, medians over replays of a graph of many; negative if it
// is not served.
struct RankSumTime {
  size_t bytes = 0;
  double nccl = -1, sums = -1;
  double gather = -1;  // NCCL's all-gather of these bytes of each rank
};

struct RankFigures {
  double copy_gbps = 0;  // copies of 256 MiB from GPU 1 to GPU 0, 1e9 bytes a second
  std::vector<RankSumTime> times;
  std::vector<ContextTime> exchanges;
  std::vector<DecoderLayerTime> decoder_layers;
  std::vector<ContextLayerTime> layers;  // empty if the GPUs cannot access each other's memory
};

// Throws Error{unsupported} with the reason if there are fewer GPUs or no NCCL, and
// Error{device_failure} if a sum is wrong.
RankFigures measure_ranks(const RankBenchOptions& options);

}  // namespace fovea::bench
