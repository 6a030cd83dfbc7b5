// SPDX-License-Identifier: Apache-2.0
// The operations of a model between attention and the matrix products, on a GPU.
#pragma once

#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class LayerOps {
 public:
  // Loads every kernel onto the current GPU. Errors as Kernel's constructor.
  LayerOps(int sm, gpu::KernelStore& store);

  // Each enqueues the operation that its parameter block describes.
  void residual(const ResidualParams& params, Stream stream) const;
  void prepare_heads(const HeadSetsParams& params, Stream stream) const;
  void gated_activation(const GatedParams& params, Stream stream) const;
  void sigmoid_gate(const SigmoidGateKernelParams& params, Stream stream) const;
  void delta_inputs(const DeltaInputsKernelParams& params, Stream stream) const;
  void mamba2_inputs(const Mamba2InputsKernelParams& params, Stream stream) const;
  void kda_gates(const KdaGatesKernelParams& params, Stream stream) const;
  void silu_gate(const SiluGateKernelParams& params, Stream stream) const;
  void softplus(const SoftplusParams& params, Stream stream) const;
  void gated_norm(const GatedNormParams& params, Stream stream) const;
  void divided_norm(const DividedNormKernelParams& params, Stream stream) const;
  void single_column(const SingleColumnParams& params, Stream stream) const;
  void gather(const GatherParams& params, Stream stream) const;
  void store_rows(const StoreRowsParams& params, Stream stream) const;
  void spread_columns(const SpreadColumnsParams& params, Stream stream) const;
  void soft_cap(const SoftCapParams& params, Stream stream) const;
  void routing(const RoutingParams& params, Stream stream) const;
  void group_choices(const GroupParams& params, Stream stream) const;
  void combine(const CombineParams& params, Stream stream) const;

 private:
  Kernel residual_, prepare_heads_, gated_activation_, sigmoid_gate_, delta_inputs_, mamba2_inputs_,
      kda_gates_, silu_gate_, softplus_, gated_norm_, divided_norm_, single_column_, gather_,
      store_rows_, spread_columns_, soft_cap_, routing_, group_choices_, combine_;
};

// Enters the slots of new tokens in the device's copy of a request table, and the tokens that the
// pass before drew in those of this pass.
class SlotRecorder {
 public:
  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  SlotRecorder(int sm, gpu::KernelStore& store);

  void record(const RecordSlotsParams& params, Stream stream) const;

 private:
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
