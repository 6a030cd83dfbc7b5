// SPDX-License-Identifier: Apache-2.0
// Formats results of gpu_suite.h as Markdown, CSV, JSON and a roofline drawing.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/gpu_suite.h"

namespace fovea::bench {

// All results for one power state.
struct GpuReport {
  DeviceInfo device;
  PowerState state = PowerState::burst;
  GpuCeilings ceilings;
  FirstCall first;
  std::vector<GpuResult> results;
};

std::string ceilings_markdown(const GpuReport& report);
std::string to_markdown(const GpuReport& report);
// Returns one table, in which the state is a column.
std::string to_csv(std::span<const GpuReport> reports);
// Returns one document: an object for one report, an array for several.
std::string to_json(std::span<const GpuReport> reports);

// Draws operations per second over operations per byte on logarithmic axes, below the two ceilings.
// Each case is a dot coloured by phase; the best peer is a ring.
std::string to_svg(const GpuReport& report);

}  // namespace fovea::bench
