// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_report.h"

#include <fmt/core.h>

namespace fovea::bench {

std::string ceilings_markdown(const DeviceInfo& device, PowerState state,
                              const GpuCeilings& ceilings) {
  return fmt::format(
      "{}, {}: read {:.2f} TB/s (bulk copies {:.2f}), copy {:.2f} TB/s, bf16 product {:.0f} "
      "TFLOP/s, e4m3 product {:.0f} TFLOP/s, empty kernel {:.2f} us in a graph, {:.2f} us of host "
      "time a launch\n",
      device.name, power_state_name(state), ceilings.read_bytes / 1e12,
      ceilings.bulk_read_bytes / 1e12, ceilings.copy_bytes / 1e12, ceilings.matmul_flops / 1e12,
      ceilings.fp8_matmul_flops / 1e12, ceilings.empty_seconds * 1e6,
      ceilings.launch_seconds * 1e6);
}

}  // namespace fovea::bench
