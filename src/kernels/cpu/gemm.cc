// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd/gemm.h"

namespace fovea::kernels::cpu {
namespace {

// Weight elements that are worth waking a thread for: 64 KiB of bf16.
constexpr int64_t kTaskElements = 32768;
// The rows of a task are a multiple of every kernel's row tile.
constexpr int64_t kRowStep = 24;

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

}  // namespace

// The cuts into tasks change no bits: one task computes each element completely.
void gemm(const GemmParams& params, ThreadPool& threads, Isa isa) {
  check(params);
  if (params.rows == 0 || params.n == 0) return;
  const auto kernel =
      params.weight_is_kn ? FOVEA_FOR_ISA(isa, gemm_kn) : FOVEA_FOR_ISA(isa, gemm_nk);
  // Four tasks per thread balance the load when other processes take some of the cores' time.
  const int64_t wanted = threads.size() == 1 ? 1 : threads.size() * 4;
  const int64_t min_columns = ceil_div(kTaskElements, std::max(params.k, 1));
  const int64_t columns =
      round_up(std::max(ceil_div<int64_t>(params.n, wanted), min_columns), kGemmPanel);
  const int64_t column_tasks = ceil_div<int64_t>(params.n, columns);
  const int64_t row_tasks_wanted = ceil_div(wanted, column_tasks);
  const int64_t rows = round_up(ceil_div<int64_t>(params.rows, row_tasks_wanted), kRowStep);
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
