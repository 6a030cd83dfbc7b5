// SPDX-License-Identifier: Apache-2.0
// Outputs of the command line tool, their destinations, and exit codes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_fovea.h"
#include "fovea/engine.h"

namespace fovea::test {
namespace {

namespace fs = std::filesystem;

// Runs the command with its standard output redirected by the shell.
ProgramResult fovea_redirected(const std::string& arguments, const std::string& redirection) {
  return run_program({"/bin/sh", "-c", "'" FOVEA_CLI "' " + arguments + " " + redirection});
}

TEST(Cli, GeneratesTheReferenceText) {
  const nlohmann::json reference =
      nlohmann::json::parse(std::ifstream(kModels + "llama/reference.json"));
  const nlohmann::json& prompt = reference["prompts"][1];
  const ProgramResult result = fovea({"generate", kModels + "llama", "--prompt", prompt["text"],
                                      "--max-new-tokens", "64", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["text"], prompt["greedy_64"]);
}

// Each flag by itself changes the text as the engine's parameter of that name does.
TEST(Cli, SamplingFlagsAreTheEnginesParameters) {
  EngineOptions options;
  options.model_path = kModels + "llama";
  options.kv_memory_bytes = size_t{32} << 20;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  GenerateRequest request{.prompt = "And God said"};
  request.sampling.temperature = 1.5F;
  request.sampling.max_new_tokens = 32;
  request.sampling.seed = 3;
  const std::vector<std::string> base = {"generate", options.model_path, "-p",  request.prompt,
                                         "--json",   "--temperature",    "1.5", "-n",
                                         "32",       "--seed",           "3"};
  const std::string usual = engine->generate({&request, 1}).front().text;
  struct Flag {
    std::vector<std::string> words;
    std::function<void(SamplingParams&)> set;
  };
  for (const Flag& flag : std::vector<Flag>{
           {{}, [](auto&) {}},
           {{"--top-k", "5"}, [](auto& s) { s.top_k = 5; }},
           {{"--top-p", "0.5"}, [](auto& s) { s.top_p = 0.5F; }},
           {{"--min-p", "0.2"}, [](auto& s) { s.min_p = 0.2F; }},
           {{"--stop", usual.substr(20, 3)}, [&](auto& s) { s.stop = {usual.substr(20, 3)}; }}}) {
    SCOPED_TRACE(flag.words.empty() ? "no flag" : flag.words[0]);
    std::vector<std::string> command = base;
    command.insert(command.end(), flag.words.begin(), flag.words.end());
    GenerateRequest same = request;
    flag.set(same.sampling);
    const GenerateResult want = engine->generate({&same, 1}).front();
    const nlohmann::json got = nlohmann::json::parse(fovea(command).out);
    EXPECT_EQ(got["tokens"], want.tokens);
    EXPECT_EQ(got["text"], want.text);
    EXPECT_EQ(want.text == usual, flag.words.empty());
  }
  request.sampling.seed = 4;
  std::vector<std::string> other = base;
  other.back() = "4";
  EXPECT_EQ(nlohmann::json::parse(fovea(other).out)["text"],
            engine->generate({&request, 1}).front().text);
}

TEST(Cli, StreamsTextToStdoutAndStatsToStderr) {
  const ProgramResult result =
      fovea({"generate", kModels + "llama", "-p", "And God said", "-n", "5", "--stats"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out.rfind("And God said", 0), 0u) << result.out;
  EXPECT_NE(result.err.find("tokens/s"), std::string::npos) << result.err;
}

TEST(Cli, ReadsThePromptFromStandardInput) {
  const ProgramResult result =
      run_program({"/bin/sh", "-c",
                   "printf 'And God said' | '" FOVEA_CLI "' generate --prompt-file - -n 5 '" +
                       kModels + "llama'"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out,
            fovea({"generate", kModels + "llama", "-p", "And God said", "-n", "5"}).out);
}

// After prompts that fill more than the budget, nearly all of it has been written: a part of a page
// is left over.
TEST(Cli, StaysWithinItsMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's own memory would be measured";
#endif
  const size_t budget = 48 << 20;  // 6000 tokens
  std::vector<std::string> command = {"generate", kModels + "llama", "-n",
                                      "2",        "--kv-memory",     std::to_string(budget)};
  for (int prompt = 0; prompt < 16; ++prompt) {
    std::string text = std::to_string(prompt);
    for (int i = 0; i < 100; ++i) text += " And God said unto them";
    command.insert(command.end(), {"-p", text});
  }
  const ProgramResult result = fovea(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const size_t weights = fs::file_size(kModels + "llama/model.safetensors");
  EXPECT_LE(result.peak_rss_bytes, weights + budget + (200u << 20));
  EXPECT_GE(result.peak_rss_bytes, budget / 10 * 9) << "not all of it was written";
}

// Lists take one value per flag, so that the model may follow them.
TEST(Cli, TheModelMayComeLast) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"generate", "-n", "2", "-p", "And God said", kModels + "llama"},
           {"generate", "-n", "2", "--tokens", "5,6", kModels + "llama"},
           {"generate", "-n", "2", "-p", "And", "--stop", "x", kModels + "llama"},
           {"check", "--no-perplexity", "--backends", "cpu", "--kv-dtypes", "fp32",
            kModels + "llama"},
       }) {
    const ProgramResult result = fovea(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out, "");
  }
}

TEST(Cli, SaysWhenOutputIsLost) {
  const std::string generate = "generate " + kModels + "llama -p x -n 4";
  for (const std::string& arguments :
       {generate, generate + " --json", std::string("explain"), std::string("backends --json"),
        std::string("env"), std::string("--help"), std::string("--version"),
        std::string("generate --help"), std::string("kernels list --json")}) {
    SCOPED_TRACE(arguments);
    const ProgramResult full = fovea_redirected(arguments, "> /dev/full");
    EXPECT_EQ(full.exit_code, 2);
    EXPECT_NE(full.err.find("No space left"), std::string::npos) << full.err;
    expect_one_line(full);
    EXPECT_EQ(fovea_redirected(arguments, ">&-").exit_code, 2);
  }
  // A reader that closes the pipe ends the program without an error.
  const ProgramResult enough = run_program(
      {"/bin/sh", "-c", "'" FOVEA_CLI "' " + generate + "000 --ignore-eos | head -c 5"});
  EXPECT_EQ(enough.out.size(), 5u);
  EXPECT_EQ(enough.err, "");
}

// stderr is closed; the command works all the same.
TEST(Cli, NeedsNoStderr) {
  const std::string generate = "generate " + kModels + "llama -p x -n 4";
  const std::string text = fovea_redirected(generate, "").out;
  for (const std::string flags : {" --stats", " --backend prefer:fa3"}) {
    const ProgramResult result = fovea_redirected(generate + flags, "2>&-");
    EXPECT_EQ(result.exit_code, 0) << flags;
    EXPECT_EQ(result.out, text);
  }
}

// Long enough for the signal to arrive before the end.
const std::vector<std::string> kLongGenerate = {
    "generate", kModels + "llama", "-p", "And God said", "-n", "4000", "--ignore-eos"};

ProgramResult interrupted(std::vector<std::string> arguments, int signal, size_t bytes) {
  arguments.insert(arguments.begin(), FOVEA_CLI);
  return interrupt_program(arguments, signal, bytes);
}

TEST(Cli, PrintsWhatThereIsWhenInterruptedWhileStreaming) {
  std::vector<std::string> shorter = kLongGenerate;
  for (const int signal : {SIGINT, SIGTERM}) {
    const size_t prompt = std::string("And God said").size();
    const ProgramResult result = interrupted(kLongGenerate, signal, prompt + 1);
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_EQ(result.err, "");
    ASSERT_TRUE(result.out.ends_with('\n')) << result.out;
    const std::string text = result.out.substr(0, result.out.size() - 1);
    EXPECT_GT(text.size(), prompt);
    // A token has at least one byte, so this limit gives all the text there was.
    shorter[5] = std::to_string(text.size());
    EXPECT_TRUE(fovea(shorter).out.starts_with(text)) << text;
  }
}

TEST(Cli, PrintsWholeJsonWhenInterrupted) {
  std::vector<std::string> command = kLongGenerate;
  command.insert(command.end(), {"-p", "In the beginning", "--json", "--stats"});
  for (const int signal : {SIGINT, SIGTERM}) {
    const ProgramResult result = interrupted(command, signal, 0);
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_NE(result.err.find("tokens/s"), std::string::npos) << result.err;
    std::istringstream lines(result.out);
    int count = 0;
    for (std::string line; std::getline(lines, line); ++count) {
      const nlohmann::json json = nlohmann::json::parse(line);
      EXPECT_EQ(json["finish_reason"], "cancelled");
      EXPECT_EQ(json["text"].get<std::string>().empty(), json["tokens"].empty());
      EXPECT_GT(json["prompt_tokens"], 0);
    }
    EXPECT_EQ(count, 2) << result.out;
    EXPECT_TRUE(result.out.ends_with('\n'));
  }
}

TEST(Cli, SaysThatAPreferredBackendDoesNotServe) {
  const std::vector<std::string> command = {
      "generate", kModels + "llama", "-p", "And God said", "-n", "4", "--backend"};
  std::vector<std::string> granted = command, refused = command;
  granted.push_back("prefer:torch_native");
  refused.push_back("prefer:fa3");
  EXPECT_EQ(fovea(granted).err, "");
  const ProgramResult result = fovea(refused);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, fovea(granted).out);
  expect_one_line(result);
  for (const char* text : {"cpu", "fa3", "NVIDIA GPUs of sm_90", "q_dtype"})
    EXPECT_NE(result.err.find(text), std::string::npos) << result.err;
  std::vector<std::string> decode = refused;
  decode[decode.size() - 2] = "--decode-backend";
  EXPECT_EQ(fovea(decode).err, result.err);
}

TEST(Cli, ChecksOnlyWhatWasNamed) {
  const std::string llama = kModels + "llama";
  const ProgramResult one = fovea(
      {"check", llama, "--no-perplexity", "--json", "--backend", "cpu", "--kv-dtype", "bf16"});
  ASSERT_EQ(one.exit_code, 0) << one.err;
  ASSERT_EQ(nlohmann::json::parse(one.out).size(), 1u);
  expect_refused(fovea({"check", llama, "--no-perplexity", "--backends", "flash"}),
                 {"flash", "sm_90", "q_dtype"});
  const ProgramResult some =
      fovea({"check", llama, "--no-perplexity", "--backends", "cpu,flash", "--kv-dtypes", "bf16"});
  EXPECT_EQ(some.exit_code, 0) << some.err;
  EXPECT_NE(some.out.find("| flash | bf16 | | | | | refused: "), std::string::npos) << some.out;
  EXPECT_NE(some.out.find("sm_90"), std::string::npos) << some.out;
}

// Progress is for people. The output for programs does not depend on stderr.
TEST(Cli, ShowsProgressOnATerminalOnly) {
  if (run_program({"/usr/bin/script", "-qec", "true", "/dev/null"}).exit_code != 0)
    GTEST_SKIP() << "no terminals here";
  const std::string folder = ::testing::TempDir() + "cli_terminal_" + std::to_string(getpid());
  fs::create_directory(folder);
  const std::string program = "'" FOVEA_CLI "' ", llama = kModels + "llama";
  for (const std::string& arguments :
       {"check " + llama + " --backend cpu --kv-dtype fp32 --no-perplexity --json",
        "generate " + llama + " -p x -n 3 --json"}) {
    SCOPED_TRACE(arguments);
    const ProgramResult plain = run_program({"/bin/sh", "-c", program + arguments});
    EXPECT_EQ(plain.err, "");
    // The pseudo-terminal's contents come back as output: stderr alone.
    const ProgramResult shown = run_program(
        {"/usr/bin/script", "-qec", program + arguments + " >'" + folder + "/out'", "/dev/null"});
    EXPECT_EQ(shown.exit_code, 0) << shown.err;
    std::ifstream file(folder + "/out");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), plain.out);
    const std::string clear = "\r\033[K";
    EXPECT_TRUE(shown.out.starts_with(clear)) << shown.out;
    EXPECT_TRUE(shown.out.ends_with(clear)) << "the last line stays: " << shown.out;
    EXPECT_NE(shown.out.find(arguments.starts_with("check") ? "cpu fp32: " : "loading "),
              std::string::npos)
        << shown.out;
  }
  fs::remove_all(folder);
}

// A model's groups are explained as the engine would load them with these flags.
TEST(Cli, ExplainsAModelWithTheOptionsOfTheEngine) {
  const std::vector<std::string> llama = {"explain", "--model", kModels + "llama", "--json"};
  const auto explain = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), llama.begin(), llama.end());
    const ProgramResult result = fovea(flags);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(result.out).at("groups").at(0);
  };
  const nlohmann::json usual = explain({});
  EXPECT_FALSE(usual.contains("decode"));
  const nlohmann::json small = explain({"--max-requests", "2", "--max-tokens", "8", "--max-kv-len",
                                        "64", "--decode-backend", "reference"});
  EXPECT_LT(small["workspace_bytes"], usual["workspace_bytes"]);
  EXPECT_EQ(small.at("decode").at("chosen"), "reference");
  expect_refused(fovea({"explain", "--decode-backend", "cpu"}), {"--decode-backend", "--model"});
}

TEST(Cli, SaysThatTheScalesOfTheCacheAre1) {
  const std::vector<std::string> generate = {"generate", kModels + "llama", "-p", "In the", "-n",
                                             "4",        "--kv-dtype",      "fp8"};
  const auto with = [&](const std::string& scale) {
    std::vector<std::string> flags = generate;
    flags.insert(flags.end(), {"--kv-scale", scale});
    return fovea(flags);
  };
  EXPECT_NE(with("per_tensor").err.find("the scales of the cache are 1"), std::string::npos);
  EXPECT_EQ(with("per_token_head").err, "");
  EXPECT_EQ(with("per_token_head").out, fovea(generate).out);
  expect_refused(with("per_token"), {"--kv-scale is 'per_token'", "per_token_head"});
}

TEST(Cli, SaysThatTheKvBudgetHoldsLessThanTheModelsContext) {
  const auto notes_with = [](const std::string& budget) {
    return fovea({"generate", kModels + "llama", "-p", "x", "-n", "1", "--kv-memory", budget}).err;
  };
  const std::string small = notes_with("1MB");
  EXPECT_NE(small.find("of 8192 tokens"), std::string::npos) << small;
  EXPECT_EQ(notes_with("64MB"), "");
}

TEST(Cli, ExplainsLatentCachesOfEveryFormat) {
  for (const auto& [dtype, layout] : {std::pair{"fp8_e4m3", "mla"},
                                      {"fp8_e4m3", "mla_fp8_rows"},
                                      {"fp8_e5m2", "mla"},
                                      {"bf16", "mla"}}) {
    const ProgramResult result =
        fovea({"explain", "--kind", "mla", "--kv-dtype", dtype, "--kv-layout", layout});
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
  EXPECT_EQ(fovea({"explain", "--kind", "mla", "--kv-dtype", "fp8_e5m2"}).exit_code, 0);
  expect_refused(fovea({"explain", "--kind", "mla", "--kv-layout", "rows"}), {"'rows'", "mla"});
}

TEST(Cli, ExplainsEveryKind) {
  for (const char* kind :
       {"mha", "mla", "gated_delta_net", "mamba1", "mamba2", "kda", "lightning"}) {
    EXPECT_EQ(fovea({"explain", "--kind", kind}).exit_code, 0) << kind;
    // For example the heads of one rank of two.
    EXPECT_EQ(fovea({"explain", "--kind", kind, "--q-heads", "8"}).exit_code, 0) << kind;
  }
  expect_refused(fovea({"explain", "--kind", "mla", "--kv-heads", "2"}), {"kind mla has 1"});
  EXPECT_EQ(fovea({"explain", "--kind", "short_conv"}).exit_code, 0);
  expect_refused(fovea({"explain", "--kind", "short_conv", "--conv-width", "1"}),
                 {"linear.conv_width is 1, kind short_conv needs 2 or more"});
}

// Works on any machine, as selection does not look at a device.
TEST(Cli, ExplainsAGpuThatIsNotHere) {
  const nlohmann::json environment = nlohmann::json::parse(fovea({"env", "--json"}).out);
  const std::string compiler = environment["kernel_compiler"];
  if (compiler.starts_with("NVRTC ") || environment["kernel_pack"] != "none") {
    const ProgramResult hopper = fovea({"explain", "--device", "sm_90", "--json"});
    ASSERT_EQ(hopper.exit_code, 0) << hopper.err;
    EXPECT_EQ(nlohmann::json::parse(hopper.out)["chosen"], "flash");
  }
  expect_refused(run_program({"/usr/bin/env", "FOVEA_KERNEL_PACK=", "FOVEA_KERNEL_CACHE=",
                              "FOVEA_JIT=0", FOVEA_CLI, "explain", "--device", "sm_90"}),
                 {"sm90/prefill", "not in the kernel pack"});
  expect_refused(fovea({"explain", "--device", "sm_75", "--backend", "portable"}),
                 {"device is sm_75, accepted: sm_80 or newer"});
  expect_refused(fovea({"explain", "--device", "sm_hopper"}), {"'sm_hopper'", "sm_90"});
  expect_refused(fovea({"explain", "--multiprocessors", "8"}), {"--multiprocessors", "sm_NN"});
}

TEST(Cli, ExplainsEveryScope) {
  for (const char* scope : {"decoder", "ragged", "encoder", "encoder_cache", "cross"}) {
    const ProgramResult result = fovea({"explain", "--scope", scope, "--json"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(nlohmann::json::parse(result.out)["chosen"], "cpu") << scope;
  }
  expect_refused(fovea({"explain", "--prefix-levels", "9"}), {"prefix_levels is 9"});
}

TEST(Cli, ExplainsDualChunks) {
  const std::vector<std::string> dual = {"explain", "--dual-chunk", "80", "--dual-local", "16"};
  const auto with = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), dual.begin(), dual.end());
    return fovea(flags);
  };
  const ProgramResult cpu = with({"--json"});
  ASSERT_EQ(cpu.exit_code, 0) << cpu.err;
  const nlohmann::json report = nlohmann::json::parse(cpu.out);
  EXPECT_EQ(report["chosen"], "cpu");
  EXPECT_EQ(
      report["notes"],
      "keys of a token's chunk of 64, of the chunk before and of older ones are three passes");
  expect_refused(with({"--backend", "flash"}), {"dual_chunk: dual_chunk.chunk_size is 80"});
  expect_refused(with({"--backend", "dual_chunk"}), {"give the layers dual_chunk"});
  expect_refused(with({"--chunk", "8"}), {"chunk is 8, must be 0"});
}

TEST(Cli, ChecksAModel) {
  const ProgramResult result = fovea({"check", kModels + "llama", "--backends", "cpu",
                                      "--kv-dtypes", "fp32,bf16", "--no-perplexity", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err << result.out;
  const nlohmann::json rows = nlohmann::json::parse(result.out);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_TRUE(rows[0]["pass"]);
  EXPECT_LT(rows[0]["max_logit_difference"], 2e-3);
}

}  // namespace
}  // namespace fovea::test
