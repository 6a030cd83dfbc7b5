// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/layer_ops/launch.h"

#include <algorithm>

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

Kernel load(const char* op, int sm, gpu::KernelStore& store) {
  return Kernel(make_variant(family("portable/layer_ops"), {op}, sm), store);
}

GridSize blocks(int64_t count) { return {static_cast<uint32_t>(count)}; }

constexpr int64_t kThreads = 256;  // threads of a block of an element-wise kernel

// The grid of an element-wise kernel: enough blocks to fill any GPU; they stride over the rest.
GridSize element_grid(int64_t count) {
  constexpr int64_t kMaxBlocks = 4096;
  return blocks(std::min(ceil_div(count, kThreads), kMaxBlocks));
}

}  // namespace

LayerOps::LayerOps(int sm, gpu::KernelStore& store)
    : residual_(load("residual", sm, store)),
      prepare_heads_(load("prepare_heads", sm, store)),
      gated_activation_(load("gated_activation", sm, store)),
      sigmoid_gate_(load("sigmoid_gate", sm, store)),
      delta_inputs_(load("delta_inputs", sm, store)),
      mamba2_inputs_(load("mamba2_inputs", sm, store)),
      kda_gates_(load("kda_gates", sm, store)),
      silu_gate_(load("silu_gate", sm, store)),
      softplus_(load("softplus", sm, store)),
      gated_norm_(load("gated_norm", sm, store)),
      divided_norm_(load("divided_norm", sm, store)),
      single_column_(load("single_column", sm, store)),
      gather_(load("gather", sm, store)),
      store_rows_(load("store_rows", sm, store)),
      spread_columns_(load("spread_columns", sm, store)),
      soft_cap_(load("soft_cap", sm, store)),
      routing_(load("routing", sm, store)),
      group_choices_(load("group_choices", sm, store)),
      combine_(load("combine", sm, store)) {}

void LayerOps::residual(const ResidualParams& params, Stream stream) const {
  residual_.launch(blocks(params.rows), params, stream, kOverlapped);
}

void LayerOps::prepare_heads(const HeadSetsParams& params, Stream stream) const {
  int64_t heads = 0;
  for (const HeadsParams& set : params.sets) heads += int64_t{set.rows} * set.heads;
  prepare_heads_.launch(blocks(ceil_div(heads, prepare_heads_.row_tile())), params, stream,
                        kOverlapped);
}

void LayerOps::gated_activation(const GatedParams& params, Stream stream) const {
  gated_activation_.launch(element_grid(params.rows * params.dim), params, stream, kOverlapped);
}

void LayerOps::sigmoid_gate(const SigmoidGateKernelParams& params, Stream stream) const {
  sigmoid_gate_.launch(element_grid(int64_t{params.rows} * params.heads * params.dim), params,
                       stream, kOverlapped);
}

void LayerOps::delta_inputs(const DeltaInputsKernelParams& params, Stream stream) const {
  const int64_t keys = int64_t{params.key_heads} * params.key_dim;
  const int64_t values = int64_t{params.value_heads} * (params.value_dim + 1);
  delta_inputs_.launch(element_grid(params.rows * 2 * (keys + values)), params, stream);
}

void LayerOps::mamba2_inputs(const Mamba2InputsKernelParams& params, Stream stream) const {
  const int64_t width = int64_t{params.values} + params.conv_dim + params.heads;
  mamba2_inputs_.launch(element_grid(params.rows * width), params, stream, kOverlapped);
}

void LayerOps::kda_gates(const KdaGatesKernelParams& params, Stream stream) const {
  const int64_t width = int64_t{params.heads} * (params.key_dim + 1);
  kda_gates_.launch(element_grid(params.rows * width), params, stream, kOverlapped);
}

void LayerOps::silu_gate(const SiluGateKernelParams& params, Stream stream) const {
  silu_gate_.launch(element_grid(int64_t{params.rows} * params.dim), params, stream, kOverlapped);
}

void LayerOps::softplus(const SoftplusParams& params, Stream stream) const {
  softplus_.launch(element_grid(params.count), params, stream, kOverlapped);
}

void LayerOps::gated_norm(const GatedNormParams& params, Stream stream) const {
  const int64_t heads = int64_t{params.rows} * params.heads;
  const int64_t of_block = params.dim > kMaxWarpHead ? 1 : gated_norm_.row_tile();
  gated_norm_.launch(blocks(ceil_div(heads, of_block)), params, stream, kOverlapped);
}

void LayerOps::divided_norm(const DividedNormKernelParams& params, Stream stream) const {
  divided_norm_.launch(blocks(params.rows), params, stream, kOverlapped);
}

void LayerOps::single_column(const SingleColumnParams& params, Stream stream) const {
  single_column_.launch(blocks(ceil_div(params.rows, single_column_.row_tile())), params, stream);
}

void LayerOps::gather(const GatherParams& params, Stream stream) const {
  gather_.launch(element_grid(int64_t{params.rows} * params.dim), params, stream, kOverlapped);
}

void LayerOps::store_rows(const StoreRowsParams& params, Stream stream) const {
  store_rows_.launch(element_grid(int64_t{params.rows} * params.dim), params, stream, kOverlapped);
}

void LayerOps::spread_columns(const SpreadColumnsParams& params, Stream stream) const {
  spread_columns_.launch(element_grid(int64_t{params.rows} * params.dim), params, stream,
                         kOverlapped);
}

void LayerOps::soft_cap(const SoftCapParams& params, Stream stream) const {
  soft_cap_.launch(element_grid(params.count), params, stream, kOverlapped);
}

void LayerOps::routing(const RoutingParams& params, Stream stream) const {
  routing_.launch(blocks(params.rows), params, stream, kOverlapped);
}

void LayerOps::group_choices(const GroupParams& params, Stream stream) const {
  group_choices_.launch(blocks(params.experts), params, stream, kOverlapped);
}

void LayerOps::combine(const CombineParams& params, Stream stream) const {
  combine_.launch(blocks(params.rows), params, stream, kOverlapped);
}

SlotRecorder::SlotRecorder(int sm, gpu::KernelStore& store)
    : kernel_(load("record_slots", sm, store)) {}

void SlotRecorder::record(const RecordSlotsParams& params, Stream stream) const {
  kernel_.launch(blocks(ceil_div(params.tokens, kThreads)), params, stream);
}

}  // namespace fovea::kernels::cuda
