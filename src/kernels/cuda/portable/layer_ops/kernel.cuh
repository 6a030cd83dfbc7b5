// SPDX-License-Identifier: Apache-2.0
// The operations between attention and the matrix products of a model. The kernels are simple: a
// decode step pays for their launches, a prefill for their bytes.
#pragma once

#include "kernels/cuda/portable/layer_ops/elementwise.cuh"
#include "kernels/cuda/portable/layer_ops/linear_layers.cuh"
#include "kernels/cuda/portable/layer_ops/norms.cuh"
#include "kernels/cuda/portable/layer_ops/routing.cuh"
#include "kernels/cuda/portable/layer_ops/single_column.cuh"

namespace fovea::kernels::cuda {

template <Op kOp>
struct OpConfig;
template <>
struct OpConfig<residual> : ResidualConfig {};
template <>
struct OpConfig<prepare_heads> : HeadsConfig {};
template <>
struct OpConfig<gated_activation> : GatedConfig {};
template <>
struct OpConfig<sigmoid_gate> : SigmoidGateConfig {};
template <>
struct OpConfig<delta_inputs> : DeltaInputsConfig {};
template <>
struct OpConfig<mamba2_inputs> : Mamba2InputsConfig {};
template <>
struct OpConfig<kda_gates> : KdaGatesConfig {};
template <>
struct OpConfig<silu_gate> : SiluGateConfig {};
template <>
struct OpConfig<softplus> : SoftplusConfig {};
template <>
struct OpConfig<gated_norm> : GatedNormConfig {};
template <>
struct OpConfig<divided_norm> : DividedNormConfig {};
template <>
struct OpConfig<single_column> : SingleColumnConfig {};
template <>
struct OpConfig<gather> : GatherConfig {};
template <>
struct OpConfig<store_rows> : StoreRowsConfig {};
template <>
struct OpConfig<spread_columns> : SpreadColumnsConfig {};
template <>
struct OpConfig<soft_cap> : SoftCapConfig {};
template <>
struct OpConfig<record_slots> : RecordSlotsConfig {};
template <>
struct OpConfig<routing> : RoutingConfig {};
template <>
struct OpConfig<group_choices> : GroupConfig {};
template <>
struct OpConfig<combine> : CombineConfig {};

template <Op kOp>
using Config = OpConfig<kOp>;

}  // namespace fovea::kernels::cuda
