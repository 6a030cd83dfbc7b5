// SPDX-License-Identifier: Apache-2.0
// The fast CPU backend: SIMD kernels of the widest instruction set the processor has.
#include "kernels/cpu/cpu.h"

#include "attention/backends/backends.h"
#include "attention/backends/host_entry.h"
#include "kernels/cpu/isa.h"

namespace fovea {
namespace {

namespace cpu = kernels::cpu;

const HostKernels kCpuKernels = {
    .name = "cpu",
    .isa = cpu::best_isa,
    .needs_isa = true,
    .attention_workspace_bytes = cpu::attention_workspace_bytes,
    .plan_attention = cpu::plan_attention,
    .attention = cpu::attention,
    .kv_write = [](const kernels::KvWriteParams& params,
                   ThreadPool& threads) { cpu::kv_write(params, threads); },
    .merge_states = [](const kernels::MergeStatesParams& params,
                       ThreadPool& threads) { cpu::merge_states(params, threads); },
    .gemm = [](const kernels::GemmParams& params,
               ThreadPool& threads) { cpu::gemm(params, threads); },
};

constexpr AttentionKind kKinds[] = {AttentionKind::mha, AttentionKind::mla};

}  // namespace

const HostKernels& cpu_kernels() { return kCpuKernels; }

BackendEntry cpu_backend() {
  Capability can = host_capability();
  can.kinds = kKinds;
  return host_entry(
      {.name = "cpu",
       .role = "softmax attention on CPUs with AVX2 or AVX-512; MLA forms by cost per request",
       .aliases = {"cpu_attn", "intel_amx"}},
      kCpuKernels, can);
}

}  // namespace fovea
