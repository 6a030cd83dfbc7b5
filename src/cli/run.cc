// SPDX-License-Identifier: Apache-2.0
#include "cli/run.h"

#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <sstream>
#include <string>
#include <system_error>

#include "cli/commands.h"
#include "fovea/error.h"
#include "fovea/version.h"

namespace {

// Exit code for invalid input, found by the option parser or by the library.
constexpr int kBadInput = 2;
// Exit code for failures that the caller did not cause: a GPU failure, or a bug.
constexpr int kFailure = 1;

// Returns "fovea generate", or "fovea" if no command was reached.
std::string command_line(const CLI::App& program) {
  std::string line = "fovea";
  for (const CLI::App* app = &program; !app->get_subcommands().empty();) {
    app = app->get_subcommands().front();
    line += " " + app->get_name();
  }
  return line;
}

// For an unknown subcommand, CLI11 reports only that a subcommand is required.
void check_command(const CLI::App& program, int argc, char** argv) {
  const CLI::App* app = &program;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const CLI::App* named = nullptr;
    std::string known;
    for (const CLI::App* command : app->get_subcommands({})) {
      if (command->get_name() == word) named = command;
      known += (known.empty() ? "" : ", ") + command->get_name();
    }
    if (known.empty() || app->get_option_no_throw(word) != nullptr) return;
    if (named == nullptr) {
      throw fovea::Error(fovea::ErrorCode::invalid_argument,
                         "no command '" + word + "', known: " + known);
    }
    app = named;
  }
}

// Help and version arrive as exceptions. CLI11 would print them without checking for errors.
void parse(CLI::App& program, int argc, char** argv) {
  check_command(program, argc, argv);
  try {
    program.parse(argc, argv);
  } catch (const CLI::Success& answer) {
    std::ostringstream text;
    program.exit(answer, text, text);
    std::fputs(text.str().c_str(), stdout);
  }
  fovea::cli::flush_stdout();
}

}  // namespace

namespace fovea::cli {

int run(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // turns file size limits into write errors
  CLI::App program{"Fovea: the attention layer of an LLM serving engine"};
  program.set_version_flag("--version", "fovea " FOVEA_VERSION);
  program.require_subcommand(1);
  add_generate(program);
  add_check(program);
  add_explain(program);
  add_backends(program);
  add_env(program);
  add_bench(program);
  add_kernels(program);
  add_serve(program);
  try {
    parse(program, argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    // CLI::RuntimeError carries the exit code of a command.
    if (dynamic_cast<const CLI::RuntimeError*>(&error)) return error.get_exit_code();
    const bool is_number = dynamic_cast<const CLI::ConversionError*>(&error) != nullptr;
    std::fprintf(stderr, "fovea: %s%s; %s --help lists the accepted values\n", error.what(),
                 is_number ? ": not a number, or too large" : "", command_line(program).c_str());
    return kBadInput;
  } catch (const Error& error) {
    clear_progress();
    std::fprintf(stderr, "fovea: %s\n", error.what());
    return error.code() == ErrorCode::device_failure ? kFailure : kBadInput;
  } catch (const std::bad_alloc&) {
    clear_progress();
    std::fputs("fovea: out of memory\n", stderr);
    return kBadInput;
  } catch (const std::system_error& error) {  // fmt reports a partial write to stdout
    clear_progress();
    std::fprintf(stderr, "fovea: %s\n", error.what());
    return kBadInput;
  } catch (const std::exception& error) {
    clear_progress();
    std::fprintf(stderr, "fovea: internal error: %s\n", error.what());
    return kFailure;
  }
}

}  // namespace fovea::cli
