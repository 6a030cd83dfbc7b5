// SPDX-License-Identifier: Apache-2.0
// The runner of models on a GPU.
#pragma once

#include <memory>

#include "engine/cache_set.h"
#include "engine/model_runner.h"
#include "engine/reserved_model.h"
#include "engine/shared_prefixes.h"

namespace fovea {

// Copies `prefixes`. `caches` and the model must outlive the result. All allocation happens here.
std::unique_ptr<ModelRunner> make_cuda_model_runner(ReservedModel model, CacheSet& caches,
                                                    const SharedPrefixes& prefixes,
                                                    const ModelRunnerOptions& options);

}  // namespace fovea
