// SPDX-License-Identifier: Apache-2.0
#include "fovea/merge_states.h"

#include "attention/cuda/state_merger.h"
#include "attention/host/state_merger.h"
#include "core/check.h"
#include "core/check_device.h"

namespace fovea {
namespace {

// Keeps products with 2^31 tokens inside 64 bits, as for the heads of a spec.
constexpr int64_t kMaxStateValues = int64_t{1} << 24;

}  // namespace

std::unique_ptr<StateMerger> make_state_merger(const StateShape& shape, Device device,
                                               ThreadPool* threads) {
  check_argument(shape.heads > 0, "heads is {}, must be positive", shape.heads);
  check_argument(shape.dim > 0, "dim is {}, must be positive", shape.dim);
  check_enum(shape.dtype, DType::u8, "dtype", "DType");
  check_argument(is_floating(shape.dtype) && !is_fp8(shape.dtype),
                 "dtype is {}, accepted: fp32, bf16, fp16", dtype_name(shape.dtype));
  const int64_t values = int64_t{shape.heads} * shape.dim;
  check_argument(values <= kMaxStateValues, "a token has {} values in its heads, at most {}",
                 values, kMaxStateValues);
  check_device(device, "device");
  if (device.kind == DeviceKind::cuda) return make_cuda_merger(shape, device);
  check_argument(threads != nullptr, "threads is null, a merger on the CPU runs on them");
  return make_host_merger(shape, *threads);
}

}  // namespace fovea
