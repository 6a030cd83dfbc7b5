// SPDX-License-Identifier: Apache-2.0
// The oracle: every operation as plain loops in fp64. It is slow and easy to verify by reading.
#pragma once

#include "fovea/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/gemm.h"
#include "kernels/kv_write.h"
#include "kernels/linear_attention.h"
#include "kernels/merge_states.h"

namespace fovea::kernels::reference {

void attention(const AttentionParams& params, ThreadPool& threads);
void kv_write(const KvWriteParams& params);
void merge_states(const MergeStatesParams& params);
void gemm(const GemmParams& params, ThreadPool& threads);
void causal_conv(const CausalConvParams& params);
void gated_delta_net(const GatedDeltaNetParams& params, ThreadPool& threads);
void mamba2(const Mamba2Params& params, ThreadPool& threads);
void mamba1(const Mamba1Params& params, ThreadPool& threads);
void kda(const KdaParams& params, ThreadPool& threads);
void lightning(const LightningParams& params, ThreadPool& threads);

}  // namespace fovea::kernels::reference
