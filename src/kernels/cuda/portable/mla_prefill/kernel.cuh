// SPDX-License-Identifier: Apache-2.0
// The steps around the products and attention of up-projected MLA: `forms` once a pass; then in
// every layer, if all rows fit the buffers,
//
//   all tokens      gather -> K, V of every head -> attention, causal -> out
//
// and otherwise
//
//   new tokens      gather -> K, V of every head -> attention, causal -> out
//   context chunk   gather -> K, V               -> attention -> part; merge_states
//
// `join` joins the two parts of queries that are stored separately.
#pragma once

#include "kernels/cuda/portable/mla_prefill/forms.cuh"
#include "kernels/cuda/portable/mla_prefill/rows.cuh"

namespace fovea::kernels::cuda {

template <Op kOp, Type kType, Type kOut>
struct Operation;
template <Type kType, Type kOut>
struct Operation<forms, kType, kOut> : FormsConfig {};
template <Type kType, Type kOut>
struct Operation<gather, kType, kOut> : GatherConfig<kType, kOut> {};
template <Type kType, Type kOut>
struct Operation<join, kType, kOut> : JoinConfig {};

template <Op kOp, Type kType, Type kOut>
using Config = Operation<kOp, kType, kOut>;

}  // namespace fovea::kernels::cuda
