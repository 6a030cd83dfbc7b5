// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <exception>

#include "cli/commands.h"
#include "fovea/error.h"

namespace {

// Wrong input, whoever noticed it: the option parser or the library.
constexpr int kBadInput = 2;

}  // namespace

int main(int argc, char** argv) {
  CLI::App program{"Fovea: the attention layer of an LLM serving engine"};
  program.set_version_flag("--version", "fovea " FOVEA_VERSION);
  program.require_subcommand(1);
  fovea::cli::add_generate(program);
  fovea::cli::add_check(program);
  fovea::cli::add_explain(program);
  fovea::cli::add_backends(program);
  fovea::cli::add_env(program);
  fovea::cli::add_bench(program);
  fovea::cli::add_kernels(program);
  try {
    program.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    // Help and version arrive here too, with exit code 0. CLI::RuntimeError carries a command's
    // own.
    if (dynamic_cast<const CLI::RuntimeError*>(&error)) return error.get_exit_code();
    return program.exit(error) == 0 ? 0 : kBadInput;
  } catch (const fovea::Error& error) {
    fovea::cli::clear_progress();
    std::fprintf(stderr, "fovea: %s\n", error.what());
    return kBadInput;
  } catch (const std::exception& error) {
    fovea::cli::clear_progress();
    std::fprintf(stderr, "fovea: internal error: %s\n", error.what());
    return 1;
  }
}
