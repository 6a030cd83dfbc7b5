// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm.h"

#include <algorithm>
#include <array>

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

// A product, and how it is cut into tasks.
struct CutProduct {
  const GemmParams* params;
  Multiply kernel;
  TaskShape task;
  int64_t row_tasks, tasks;

  void run(int64_t number) const {
    const int64_t row = number % row_tasks * task.rows;
    const int64_t column = number / row_tasks * task.columns;
    kernel(*params, {static_cast<int32_t>(row),
                     static_cast<int32_t>(std::min<int64_t>(row + task.rows, params->rows)),
                     static_cast<int32_t>(column),
                     static_cast<int32_t>(std::min<int64_t>(column + task.columns, params->n))});
  }
};

CutProduct cut(const GemmParams& params, const ThreadPool& threads, Isa isa) {
  check(params);
  CutProduct product{&params, choose_kernel(params, isa), {}, 0, 0};
  if (params.rows == 0 || params.n == 0) return product;
  const int64_t wanted = wanted_tasks(threads);
  product.task = uses_tiles(params, isa) ? cut_rows(params, wanted) : cut_columns(params, wanted);
  product.row_tasks = ceil_div<int64_t>(params.rows, product.task.rows);
  product.tasks = product.row_tasks * ceil_div<int64_t>(params.n, product.task.columns);
  return product;
}

}  // namespace

void gemm(const GemmParams& params, ThreadPool& threads, Isa isa) {
  gemms({&params, 1}, threads, isa);
}

void gemms(std::span<const GemmParams> products, ThreadPool& threads, Isa isa) {
  check_argument(products.size() <= kMaxGemms, "products holds {}, must hold at most {}",
                 products.size(), kMaxGemms);
  std::array<CutProduct, kMaxGemms> cuts{};
  int64_t tasks = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    cuts[i] = cut(products[i], threads, isa);
    tasks += cuts[i].tasks;
  }
  threads.parallel_for(tasks, [&](int64_t task, int) {
    const CutProduct* product = cuts.data();
    for (; task >= product->tasks; ++product) task -= product->tasks;
    product->run(task);
  });
}

}  // namespace fovea::kernels::cpu
