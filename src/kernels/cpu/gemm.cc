// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cpu/amx/gemm.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/gemm.h"

namespace fovea::kernels::cpu {
namespace {

// Weight elements that are worth waking a thread for: 64 KiB of bf16.
constexpr int64_t kTaskElements = 32768;
// The rows of a task are a multiple of every kernel's row tile.
constexpr int64_t kRowStep = 24;
// The rows of a task of tiles are a multiple of this, which is what two rounds of tiles take.
constexpr int64_t kTiledRows = 64;

void check(const GemmParams& params) {
  check_argument(params.rows >= 0 && params.n >= 0 && params.k >= 0,
                 "rows, n and k are {}, {} and {}, must not be negative", params.rows, params.n,
                 params.k);
  check_argument(params.weight_dtype == DType::f32 || params.weight_dtype == DType::bf16 ||
                     params.weight_dtype == DType::f16,
                 "weight_dtype is {}, must be fp32, bf16 or fp16", dtype_name(params.weight_dtype));
  const int64_t weight_row = params.weight_is_kn ? params.n : params.k;
  check_argument(params.weight_stride >= weight_row, "weight_stride is {}, must be at least {}",
                 params.weight_stride, weight_row);
  check_argument(params.rows <= 1 || params.x_stride >= params.k,
                 "x_stride is {}, must be at least k ({})", params.x_stride, params.k);
  check_argument(params.rows <= 1 || params.out_stride >= params.n,
                 "out_stride is {}, must be at least n ({})", params.out_stride, params.n);
}

bool uses_tiles(const GemmParams& params, Isa isa) {
  return isa == Isa::amx && params.weight_dtype == DType::bf16 && !params.weight_is_kn;
}

using Multiply = void (*)(const GemmParams&, const GemmRange&);

Multiply choose_kernel(const GemmParams& params, Isa isa) {
#if defined(__x86_64__)
  if (uses_tiles(params, isa)) return amx::gemm_nk;
#endif
  return params.weight_is_kn ? FOVEA_FOR_ISA(isa, gemm_kn) : FOVEA_FOR_ISA(isa, gemm_nk);
}

// A task's share of the output. The cut changes no bits: one task computes each element completely.
struct TaskShape {
  int64_t rows, columns;
};

// Four tasks per thread balance the load when other processes take some of the cores' time.
int64_t wanted_tasks(const ThreadPool& threads) {
  return threads.size() == 1 ? 1 : threads.size() * 4;
}

// Cuts columns first, so that each weight is converted once.
TaskShape cut_columns(const GemmParams& params, int64_t wanted) {
  const int64_t min_columns = ceil_div(kTaskElements, std::max(params.k, 1));
  const int64_t columns =
      round_up(std::max(ceil_div<int64_t>(params.n, wanted), min_columns), kGemmPanel);
  const int64_t row_tasks = ceil_div(wanted, ceil_div<int64_t>(params.n, columns));
  return {round_up(ceil_div<int64_t>(params.rows, row_tasks), kRowStep), columns};
}

// Cuts rows first: tiles convert rows, not weights.
TaskShape cut_rows(const GemmParams& params, int64_t wanted) {
  const int64_t row_tasks = std::min(wanted, ceil_div<int64_t>(params.rows, kTiledRows));
  const TaskShape columns = cut_columns(params, ceil_div(wanted, row_tasks));
  return {round_up(ceil_div<int64_t>(params.rows, row_tasks), kTiledRows), columns.columns};
}

}  // namespace

void gemm(const GemmParams& params, ThreadPool& threads, Isa isa) {
  check(params);
  if (params.rows == 0 || params.n == 0) return;
  const Multiply kernel = choose_kernel(params, isa);
  const int64_t wanted = wanted_tasks(threads);
  const auto [rows, columns] =
      uses_tiles(params, isa) ? cut_rows(params, wanted) : cut_columns(params, wanted);
  const int64_t column_tasks = ceil_div<int64_t>(params.n, columns);
  const int64_t row_tasks = ceil_div<int64_t>(params.rows, rows);
  threads.parallel_for(column_tasks * row_tasks, [&](int64_t task, int) {
    const int64_t row = task % row_tasks * rows;
    const int64_t column = task / row_tasks * columns;
    const GemmRange range = {static_cast<int32_t>(row),
                             static_cast<int32_t>(std::min<int64_t>(row + rows, params.rows)),
                             static_cast<int32_t>(column),
                             static_cast<int32_t>(std::min<int64_t>(column + columns, params.n))};
    kernel(params, range);
  });
}

}  // namespace fovea::kernels::cpu
