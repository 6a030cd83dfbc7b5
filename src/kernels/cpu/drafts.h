// SPDX-License-Identifier: Apache-2.0
// The operations of kernels/drafts.h on a CPU. Results do not depend on the number of threads.
#pragma once

#include "fovea/thread_pool.h"
#include "kernels/drafts.h"

namespace fovea::kernels::cpu {

void describe_drafts(const DescribeDraftsParams& params);
void accept_tokens(const AcceptTokensParams& params);
void accept_sampled(const AcceptSampledParams& params, ThreadPool& threads);
void commit_drafts(const CommitDraftsParams& params, ThreadPool& threads);

}  // namespace fovea::kernels::cpu
