// SPDX-License-Identifier: Apache-2.0
// The oracle as a backend: every feature, fp64 inside, slow.
#include "kernels/reference/reference.h"

#include "attention/backends/backends.h"
#include "attention/host/entry.h"

namespace fovea {
namespace {

namespace reference = kernels::reference;

const HostKernels kReferenceKernels = {
    .name = "reference",
    .isa = [] { return kernels::cpu::Isa::none; },
    .attention_workspace_bytes = [](const HostKernels::Shape&, const BatchLimits&) -> size_t {
      return 0;
    },
    .plan_attention = [](const HostKernels::Shape&, const kernels::AttentionParams&,
                         std::span<std::byte>) { return HostKernels::Schedule{}; },
    .attention = [](const HostKernels::Shape&, const kernels::AttentionParams& params,
                    const HostKernels::Schedule&,
                    ThreadPool& threads) { reference::attention(params, threads); },
    .kv_write = [](const kernels::KvWriteParams& params,
                   ThreadPool&) { reference::kv_write(params); },
    .merge_states = [](const kernels::MergeStatesParams& params,
                       ThreadPool&) { reference::merge_states(params); },
    .gemm = reference::gemm,
    .causal_conv = [](const kernels::CausalConvParams& params,
                      ThreadPool&) { reference::causal_conv(params); },
    .gated_delta_net = reference::gated_delta_net,
    .mamba2 = reference::mamba2,
    .mamba1 = reference::mamba1,
    .kda = reference::kda,
    .lightning = reference::lightning,
};

}  // namespace

const HostKernels& reference_kernels() { return kReferenceKernels; }

BackendEntry reference_backend() {
  static constexpr DType kQDtypes[] = {DType::f32, DType::f16, DType::bf16, DType::f8e4m3};
  Capability can = host_capability();
  can.q_dtypes = kQDtypes;
  return host_entry({.name = "reference",
                     .role = "the oracle: every feature on any CPU, fp64 inside, slow",
                     .aliases = {"torch_native", "torch_sdpa"}},
                    kReferenceKernels, can);
}

}  // namespace fovea
