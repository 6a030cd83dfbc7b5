// SPDX-License-Identifier: Apache-2.0
// The command line tool.
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "cli/run.h"
#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {

void bind_commands(nb::module_& module) {
  module.def(
      "run_command",
      [](nb::handle arguments) {
        auto words = value_from<std::vector<std::string>>(arguments, "arguments");
        words.insert(words.begin(), "fovea");
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        const auto count = static_cast<int>(argv.size());
        argv.push_back(nullptr);
        const nb::gil_scoped_release release;
        return cli::run(count, argv.data());
      },
      nb::arg("arguments"), nb::sig("def run_command(arguments: list[str]) -> int"),
      "Runs the command line tool and returns its exit status. It changes how the process treats "
      "signals.");
}

}  // namespace fovea::python
