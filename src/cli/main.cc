// SPDX-License-Identifier: Apache-2.0
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

// Wrong input, whoever noticed it: the option parser or the library.
constexpr int kBadInput = 2;
// Not the caller's doing: a GPU that failed, a fault of this program.
constexpr int kFailure = 1;

// "fovea generate", or "fovea" where no command was reached.
std::string command_line(const CLI::App& program) {
  std::string line = "fovea";
  for (const CLI::App* app = &program; !app->get_subcommands().empty();) {
    app = app->get_subcommands().front();
    line += " " + app->get_name();
  }
  return line;
}

// CLI11 says only that a subcommand is required when it does not know the one it got.
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

// Help and the version arrive as exceptions; CLI11 would print them without a look at the result.
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

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is then an error of the write
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
    parse(program, argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    // CLI::RuntimeError carries a command's own exit code.
    if (dynamic_cast<const CLI::RuntimeError*>(&error)) return error.get_exit_code();
    const bool is_number = dynamic_cast<const CLI::ConversionError*>(&error) != nullptr;
    std::fprintf(stderr, "fovea: %s%s; %s --help lists what is accepted\n", error.what(),
                 is_number ? ": not a number, or too large" : "", command_line(program).c_str());
    return kBadInput;
  } catch (const fovea::Error& error) {
    fovea::cli::clear_progress();
    std::fprintf(stderr, "fovea: %s\n", error.what());
    return error.code() == fovea::ErrorCode::device_failure ? kFailure : kBadInput;
  } catch (const std::bad_alloc&) {
    fovea::cli::clear_progress();
    std::fputs("fovea: out of memory\n", stderr);
    return kBadInput;
  } catch (const std::system_error& error) {  // fmt: stdout took only a part
    fovea::cli::clear_progress();
    std::fprintf(stderr, "fovea: %s\n", error.what());
    return kBadInput;
  } catch (const std::exception& error) {
    fovea::cli::clear_progress();
    std::fprintf(stderr, "fovea: internal error: %s\n", error.what());
    return kFailure;
  }
}
