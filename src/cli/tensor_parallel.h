// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include "fovea/parallel_engine.h"

namespace fovea::cli {

inline void add_tensor_parallel(CLI::App& command, ParallelOptions& options) {
  command
      .add_option(
          "--tp", options.tensor_parallel,
          "ranks that share the model, threads of this process with a GPU each, or on the CPU")
      ->capture_default_str();
  command
      .add_option("--dcp", options.context_parallel,
                  "ranks that distribute the tokens of a request, too: 1, or as --tp")
      ->capture_default_str();
}

}  // namespace fovea::cli
