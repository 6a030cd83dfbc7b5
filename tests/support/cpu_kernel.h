// SPDX-License-Identifier: Apache-2.0
// Runs a case by the CPU kernels of one instruction set, without a backend.
#pragma once

#include <gtest/gtest.h>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/cpu.h"
#include "support/kernel_problem.h"
#include "support/poison.h"

namespace fovea::test {

inline kernels::cpu::AttentionShape shape_of(const AttentionSpec& spec, kernels::cpu::Isa isa,
                                             int threads) {
  kernels::cpu::AttentionShape shape;
  shape.isa = isa;
  shape.threads = threads;
  shape.q_heads = spec.q_heads;
  shape.kv_heads = spec.kv_heads;
  shape.head_dim = cached_key_dim(spec);
  shape.head_dim_v = cached_value_dim(spec);
  return shape;
}

// Stores the new tokens and attends, in a workspace of exactly the required bytes.
inline Output run_cpu_kernel(const AttentionCase& test, const CaseData& data, Fill fill,
                             kernels::cpu::Isa isa, int thread_count) {
  ThreadPool threads(thread_count);
  KernelProblem problem(test, data, fill);
  if (const auto write = problem.write_params()) kernels::cpu::kv_write(*write, threads, isa);
  const kernels::cpu::AttentionShape shape = shape_of(test.spec, isa, thread_count);
  const size_t bytes = kernels::cpu::attention_workspace_bytes(shape, limits_of(test));
  GuardedBuffer workspace(bytes, fill);
  const kernels::AttentionParams params = problem.attention_params();
  const auto schedule = kernels::cpu::plan_attention(shape, params, workspace.bytes());
  kernels::cpu::attention(shape, params, schedule, threads);
  EXPECT_TRUE(workspace.guards_intact());
  EXPECT_TRUE(problem.untouched_outside());
  return problem.output();
}

}  // namespace fovea::test
