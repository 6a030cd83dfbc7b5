// SPDX-License-Identifier: Apache-2.0
// Drafts of a second, smaller model, or of a head on the model itself. Both have caches of their
// own.
#pragma once

#include <memory>

#include "engine/cache_set.h"
#include "engine/draft_model.h"
#include "engine/drafter.h"
#include "engine/model_runner.h"
#include "engine/plan_engine.h"
#include "fovea/thread_pool.h"

namespace fovea {

// Makes a drafter whose guesses are drawn from the model by each request's own rules, seed and
// positions. Where the runner draws tokens (on a GPU, and with host_draws), a pass is enqueued
// before the token of the one before is known, the tokens of the last pass of chains are left to
// finish(), and heads have begin_next(); the passes of trees wait for one another. A request that
// does not fit the caches or the context gets no drafts. `caches` are those of the model that it
// drafts for, where a head finds the features of a request's tokens; `drawn` are the lists of that
// model's runner. The model, `threads`, `caches`, `drawn` and the registry of the options must
// outlive it.
std::unique_ptr<Drafter> make_model_drafter(const DraftModel& draft, SizedEngine sized,
                                            ThreadPool& threads, CacheSet& caches,
                                            bool host_draws = false, const DrawnLists& drawn = {});

}  // namespace fovea
