// SPDX-License-Identifier: Apache-2.0
// Results of gpu_suite.h as Markdown, CSV, JSON and a roofline drawing.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/gpu_suite.h"

namespace fovea::bench {

// All results of one power state.
struct GpuReport {
  DeviceInfo device;
  PowerState state = PowerState::burst;
  GpuCeilings ceilings;
  FirstCall first;
  std::vector<GpuResult> results;
};

std::string ceilings_markdown(const GpuReport& report);
std::string to_markdown(const GpuReport& report);
// One table; the state is a column.
std::string to_csv(std::span<const GpuReport> reports);
// One document: an object for one report, an array of them for several.
std::string to_json(std::span<const GpuReport> reports);

// Achieved operations per second over operations per byte, on logarithmic axes, beneath the two
// ceilings. A dot is a case, its colour the phase; the best peer is a ring.
std::string to_svg(const GpuReport& report);

}  // namespace fovea::bench
