// SPDX-License-Identifier: Apache-2.0
// The fast CPU versions of the operations that need no plan. Results depend on the instruction set,
// but not on the number of threads; those of a row or request do not depend on the rest of the
// batch. Isa::none runs code that every processor supports.
#pragma once

#include <cstddef>
#include <span>

#include "fovea/thread_pool.h"
#include "kernels/cpu/isa.h"
#include "kernels/gemm.h"
#include "kernels/kv_write.h"
#include "kernels/linear_attention.h"
#include "kernels/merge_states.h"

namespace fovea::kernels::cpu {

void kv_write(const KvWriteParams& params, ThreadPool& threads, Isa isa = best_isa());
void merge_states(const MergeStatesParams& params, ThreadPool& threads, Isa isa = best_isa());
void gemm(const GemmParams& params, ThreadPool& threads, Isa isa = best_isa());
// Computes up to kMaxGemms products, none of which takes the result of another, at the same time.
// Small products leave threads idle that the next ones can use.
constexpr size_t kMaxGemms = 3;
void gemms(std::span<const GemmParams> products, ThreadPool& threads, Isa isa = best_isa());
void causal_conv(const CausalConvParams& params, ThreadPool& threads, Isa isa = best_isa());
void gated_delta_net(const GatedDeltaNetParams& params, ThreadPool& threads, Isa isa = best_isa());
void mamba2(const Mamba2Params& params, ThreadPool& threads, Isa isa = best_isa());
void mamba1(const Mamba1Params& params, ThreadPool& threads, Isa isa = best_isa());
void kda(const KdaParams& params, ThreadPool& threads, Isa isa = best_isa());
void lightning(const LightningParams& params, ThreadPool& threads, Isa isa = best_isa());

}  // namespace fovea::kernels::cpu
