// SPDX-License-Identifier: Apache-2.0
// The operations of a backend on the CPU. `reference` and `cpu` are the same backend with two such
// tables.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "fovea/batch.h"
#include "fovea/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/cpu/attention.h"
#include "kernels/gemm.h"
#include "kernels/kv_write.h"
#include "kernels/linear_attention.h"
#include "kernels/merge_states.h"

namespace fovea {

struct HostKernels {
  using Shape = kernels::cpu::AttentionShape;
  using Schedule = kernels::cpu::AttentionSchedule;

  std::string_view name;
  kernels::cpu::Isa (*isa)();
  bool needs_isa = false;  // a processor whose isa() is none cannot run them
  // As in kernels/cpu/attention.h.
  size_t (*attention_workspace_bytes)(const Shape&, const BatchLimits&);
  Schedule (*plan_attention)(const Shape&, const kernels::AttentionParams&, std::span<std::byte>);
  void (*attention)(const Shape&, const kernels::AttentionParams&, const Schedule&, ThreadPool&);

  void (*kv_write)(const kernels::KvWriteParams&, ThreadPool&);
  void (*merge_states)(const kernels::MergeStatesParams&, ThreadPool&);
  void (*gemm)(const kernels::GemmParams&, ThreadPool&);
  void (*causal_conv)(const kernels::CausalConvParams&, ThreadPool&);
  void (*gated_delta_net)(const kernels::GatedDeltaNetParams&, ThreadPool&);
  void (*mamba2)(const kernels::Mamba2Params&, ThreadPool&);
  void (*mamba1)(const kernels::Mamba1Params&, ThreadPool&);
  void (*kda)(const kernels::KdaParams&, ThreadPool&);
  void (*lightning)(const kernels::LightningParams&, ThreadPool&);
};

}  // namespace fovea
