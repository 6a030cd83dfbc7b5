// SPDX-License-Identifier: Apache-2.0
// The command `backends`, which prints the table of backends.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "fovea/select_backend.h"

namespace fovea::cli {
namespace {

std::string graph_name(GraphSupport support) {
  return support == GraphSupport::always ? "always" : "never";
}

}  // namespace

void add_backends(CLI::App& program) {
  auto json = std::make_shared<bool>(false);
  CLI::App* command =
      program.add_subcommand("backends", "list the backends in order of preference");
  command->add_flag("--json", *json, "print the table as JSON");
  command->callback([json] {
    const BackendRegistry registry = BackendRegistry::builtin();
    nlohmann::ordered_json report = nlohmann::ordered_json::array();
    for (const BackendEntry& entry : registry.entries()) {
      report.push_back({{"name", entry.name},
                        {"role", entry.role},
                        {"aliases", entry.aliases},
                        {"graphs", graph_name(entry.graphs)},
                        {"why_not_built", entry.why_not_built}});
    }
    if (*json) {
      fmt::print("{}\n", report.dump(2));
      return;
    }
    fmt::print("| backend | role | graphs | other names |\n| --- | --- | --- | --- |\n");
    for (const BackendEntry& entry : registry.entries()) {
      if (!entry.why_not_built.empty()) continue;
      fmt::print("| `{}` | {} | {} | {} |\n", entry.name, entry.role, graph_name(entry.graphs),
                 fmt::join(entry.aliases, ", "));
    }
    fmt::print(
        "\nKnown, but not in this build:\n\n| name | why | other names |\n| --- | --- | --- |\n");
    for (const BackendEntry& entry : registry.entries()) {
      if (entry.why_not_built.empty()) continue;
      const bool says_all = entry.role == entry.why_not_built;
      fmt::print("| `{}` | {}{} | {} |\n", entry.name, says_all ? "" : entry.role + ": ",
                 entry.why_not_built, fmt::join(entry.aliases, ", "));
    }
  });
}

}  // namespace fovea::cli
