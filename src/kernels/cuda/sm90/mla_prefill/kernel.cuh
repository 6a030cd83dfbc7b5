// SPDX-License-Identifier: Apache-2.0
// Around up-projected MLA: forms once a pass; then in every layer
//
//   new tokens      gather -> K, V of every head (portable/head_gemm) -> sm90/prefill, causal -> out
//   context chunk   gather -> K, V                                    -> sm90/prefill -> part; add
//
// join: where the two parts of the queries lie apart.
#pragma once

#include "kernels/cuda/sm90/mla_prefill/forms.cuh"
#include "kernels/cuda/sm90/mla_prefill/rows.cuh"

namespace fovea::kernels::cuda {

template <Op kOp, Type kType>
struct Operation;
template <Type kType>
struct Operation<forms, kType> : FormsConfig {};
template <Type kType>
struct Operation<gather, kType> : GatherConfig<kType> {};
template <Type kType>
struct Operation<add, kType> : AddConfig<kType> {};
template <Type kType>
struct Operation<join, kType> : JoinConfig {};

template <Op kOp, Type kType>
using Config = Operation<kOp, kType>;

}  // namespace fovea::kernels::cuda
