// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

namespace fovea::cli {

// Adds `engine` to the subcommands of `bench`.
void add_bench_engine(CLI::App& bench);

}  // namespace fovea::cli
