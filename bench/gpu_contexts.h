// SPDX-License-Identifier: Apache-2.0
// Measures what attention over distributed contexts takes on several GPUs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/rank_links.h"

namespace fovea::bench {

// Times in microseconds. `queries` and `states` are one exchange each, over peers' memory (own) and
// over NCCL with the same kernels around it; negative: not served.
struct ContextTime {
  std::string shape;
  size_t query_bytes = 0, state_bytes = 0;  // bytes of the message to each rank
  double own_queries = -1, own_states = -1;
  double nccl_queries = -1, nccl_states = -1;
};

// A layer of MLA with 128 heads over requests of the same length, with projections, on one GPU with
// all heads and on all ranks with the exchanges.
struct ContextLayerTime {
  int32_t requests = 0, kv_len = 0;
  double one = -1, ranks = -1;
  double worst = 0;  // largest difference of results, relative to their root mean square
};

// Called by all ranks at once; each gets the same number of results.
std::vector<ContextTime> measure_exchanges(const ModelRanks& links, int gpu);
std::vector<ContextLayerTime> measure_context_layers(const ModelRanks& links, int gpu);

}  // namespace fovea::bench
