// SPDX-License-Identifier: Apache-2.0
#include "server/serve.h"

#include <fmt/core.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "cli/commands.h"
#include "cli/ranks.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

struct ServeFlags {
  EngineFlags engine;
  RankFlags ranks;
  server::ServeOptions options;
  std::optional<std::string> key_file;
  std::optional<std::string> max_body;
  int32_t drain_seconds = 30;
};

// Returns the last part of the model's path.
std::string default_name(const std::string& model) {
  std::filesystem::path path = std::filesystem::path(model).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  const std::string name = path.filename().string();
  return name.empty() || name == "." ? "model" : name;
}

// Keys come from a file or the environment: arguments are seen by every user of the machine.
std::vector<std::string> read_keys(const std::optional<std::string>& file) {
  std::vector<std::string> keys;
  const char* const from_environment = std::getenv("FOVEA_API_KEY");
  if (from_environment != nullptr && *from_environment != '\0') keys.push_back(from_environment);
  if (!file) return keys;
  std::ifstream lines(*file);
  if (!lines) throw Error(ErrorCode::io, fmt::format("--api-keys: cannot read {}", *file));
  const size_t before = keys.size();
  for (std::string line; std::getline(lines, line);) {
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty()) keys.push_back(std::move(line));
  }
  if (keys.size() == before) {
    throw Error(ErrorCode::invalid_argument, fmt::format("--api-keys: {} has no key", *file));
  }
  return keys;
}

void run(const ServeFlags& flags) {
  server::ServeOptions options = flags.options;
  options.api_keys = read_keys(flags.key_file);
  if (options.model.empty()) options.model = default_name(flags.engine.options.model_path);
  if (flags.max_body) options.http.body_bytes = parse_size_flag("--max-body", *flags.max_body);
  options.drain_timeout = std::chrono::seconds(flags.drain_seconds);
  options.max_running = flags.engine.options.max_requests;
  Ranks ranks(flags.ranks);
  if (ranks.follow(flags.engine.options.device)) return;
  show_progress("loading " + flags.engine.options.model_path);
  std::unique_ptr<Engine> engine = load_parallel_engine(flags.engine.parsed(), ranks.options());
  clear_progress();
  print_fallbacks(*engine);
  server::serve(std::move(engine), options, [&](uint16_t port) {
    const bool is_v6 = options.host.find(':') != std::string::npos;
    fmt::print("fovea: {} is served at http://{}:{}\n", options.model,
               is_v6 ? "[" + options.host + "]" : options.host, port);
    flush_stdout();
  });
}

void add_limits(CLI::App& command, ServeFlags& flags) {
  server::ServeOptions& options = flags.options;
  command
      .add_option("--max-queue", options.max_waiting,
                  "waiting requests; more are answered with 429")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  command.add_option("--max-body", flags.max_body, "bytes of a request, e.g. 8MB; default 8MB");
  command.add_option("--max-connections", options.http.connections, "open connections")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  command
      .add_option("--drain-timeout", flags.drain_seconds,
                  "seconds that running requests have after SIGTERM")
      ->capture_default_str()
      ->check(CLI::Range(0, 3600));
}

}  // namespace

void add_serve(CLI::App& program) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* command =
      program.add_subcommand("serve", "serve a checkpoint over HTTP with OpenAI's API");
  add_engine_flags(*command, flags->engine);
  add_choice_flags(*command, flags->engine);
  add_rank_flags(*command, flags->ranks);
  server::ServeOptions& options = flags->options;
  command->add_option("--host", options.host, "address to listen on")->capture_default_str();
  command->add_option("--port", options.port, "0 takes a free one")->capture_default_str();
  command->add_option("--model-name", options.model,
                      "name of the model for clients; default the folder's");
  command->add_option("--api-keys", flags->key_file,
                      "file with an API key on each line; one more can be in FOVEA_API_KEY");
  add_list(*command, "--allow-host", options.hosts,
           "another name of this machine that clients may use, without API keys; repeatable");
  add_limits(*command, *flags);
  command->footer(
      "The page at / chats with the model. SIGTERM and SIGINT (Ctrl-C) let running requests\n"
      "finish; a second signal ends them. docs/server.md describes endpoints, fields and limits.");
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
