// SPDX-License-Identifier: Apache-2.0
// The fast backends on the CPU: `cpu` for softmax attention, `linear` for recurrent layers. Both
// run the widest instruction set the processor has; only attention has no version without one.
#include "kernels/cpu/cpu.h"

#include "attention/backends/backends.h"
#include "attention/host/entry.h"
#include "kernels/cpu/isa.h"

namespace fovea {
namespace {

namespace cpu = kernels::cpu;

HostKernels simd_kernels(std::string_view name) {
  return {
      .name = name,
      .isa = cpu::best_isa,
      .attention_workspace_bytes = cpu::attention_workspace_bytes,
      .plan_attention = cpu::plan_attention,
      .attention = cpu::attention,
      .kv_write = [](const kernels::KvWriteParams& params,
                     ThreadPool& threads) { cpu::kv_write(params, threads); },
      .merge_states = [](const kernels::MergeStatesParams& params,
                         ThreadPool& threads) { cpu::merge_states(params, threads); },
      .gemm = [](const kernels::GemmParams& params,
                 ThreadPool& threads) { cpu::gemm(params, threads); },
      .causal_conv = [](const kernels::CausalConvParams& params,
                        ThreadPool& threads) { cpu::causal_conv(params, threads); },
      .gated_delta_net = [](const kernels::GatedDeltaNetParams& params,
                            ThreadPool& threads) { cpu::gated_delta_net(params, threads); },
      .mamba2 = [](const kernels::Mamba2Params& params,
                   ThreadPool& threads) { cpu::mamba2(params, threads); },
      .mamba1 = [](const kernels::Mamba1Params& params,
                   ThreadPool& threads) { cpu::mamba1(params, threads); },
      .kda = [](const kernels::KdaParams& params,
                ThreadPool& threads) { cpu::kda(params, threads); },
      .lightning = [](const kernels::LightningParams& params,
                      ThreadPool& threads) { cpu::lightning(params, threads); },
  };
}

constexpr AttentionKind kSoftmax[] = {AttentionKind::mha, AttentionKind::mla};
constexpr AttentionKind kLinear[] = {
    AttentionKind::gated_delta_net, AttentionKind::mamba2, AttentionKind::kda,
    AttentionKind::lightning,       AttentionKind::mamba1, AttentionKind::short_conv};

}  // namespace

const HostKernels& cpu_kernels() {
  static const HostKernels kernels = [] {
    HostKernels table = simd_kernels("cpu");
    table.needs_isa = true;
    return table;
  }();
  return kernels;
}

// The first look at the CPU allocates, which no pass may do.
const HostKernels& linear_kernels() {
  static const HostKernels kernels = [] {
    (void)cpu::best_isa();
    return simd_kernels("linear");
  }();
  return kernels;
}

BackendEntry cpu_backend() {
  Capability can = host_capability();
  can.kinds = kSoftmax;
  return host_entry(
      {.name = "cpu",
       .role = "softmax attention on CPUs with AVX2 or AVX-512; MLA forms by cost per request",
       .aliases = {"cpu_attn", "intel_amx"}},
      cpu_kernels(), can);
}

BackendEntry linear_backend() {
  Capability can = host_capability();
  can.kinds = kLinear;
  return host_entry({.name = "linear",
                     .role = "gated delta net, KDA, Mamba and lightning attention and short "
                             "convolutions on CPUs",
                     .aliases = {"gdn_attn", "mamba1_attn", "mamba2", "mamba2_attn", "linear_attn",
                                 "short_conv_attn"}},
                    linear_kernels(), can);
}

}  // namespace fovea
