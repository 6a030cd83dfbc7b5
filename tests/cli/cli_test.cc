// SPDX-License-Identifier: Apache-2.0
// The command line tool as a user runs it: what it prints, where, and how it ends.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/run_program.h"

namespace fovea::test {
namespace {

namespace fs = std::filesystem;

const std::string kModels = std::string(FOVEA_SOURCE_DIR) + "/testdata/models/";

ProgramResult fovea(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), FOVEA_CLI);
  return run_program(arguments);
}

// Its standard output goes where the shell's `redirection` says.
ProgramResult fovea_redirected(const std::string& arguments, const std::string& redirection) {
  return run_program({"/bin/sh", "-c", "'" FOVEA_CLI "' " + arguments + " " + redirection});
}

// Bad input: exit code 2, one line on stderr, nothing on stdout.
void expect_refused(const ProgramResult& result, const std::vector<std::string>& mentions) {
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  for (const std::string& text : mentions) {
    EXPECT_NE(result.err.find(text), std::string::npos) << "no '" << text << "' in: " << result.err;
  }
}

void expect_one_line(const ProgramResult& result) {
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

// A copy of the llama checkpoint that a test may damage.
class DamagedModel {
 public:
  DamagedModel() {
    path_ = fs::temp_directory_path() / ("fovea_cli_test_" + std::to_string(getpid()));
    fs::remove_all(path_);
    fs::copy(kModels + "llama", path_);
  }
  ~DamagedModel() { fs::remove_all(path_); }
  std::string folder() const { return path_.string(); }
  fs::path file(const std::string& name) const { return path_ / name; }

  std::string read(const std::string& name) const {
    std::ifstream stream(file(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(file(name), std::ios::binary) << bytes;
  }
  // Replaces text of the safetensors header by text of the same length.
  void edit_header(const std::string& from, const std::string& to) const {
    ASSERT_EQ(from.size(), to.size());
    std::string bytes = read("model.safetensors");
    const size_t at = bytes.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    bytes.replace(at, from.size(), to);
    write("model.safetensors", bytes);
  }

 private:
  fs::path path_;
};

TEST(Cli, GeneratesTheReferenceText) {
  const nlohmann::json reference =
      nlohmann::json::parse(std::ifstream(kModels + "llama/reference.json"));
  const nlohmann::json& prompt = reference["prompts"][1];
  const ProgramResult result = fovea({"generate", kModels + "llama", "--prompt", prompt["text"],
                                      "--max-new-tokens", "64", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["text"], prompt["greedy_64"]);
}

TEST(Cli, StreamsTextToStdoutAndStatsToStderr) {
  const ProgramResult result =
      fovea({"generate", kModels + "llama", "-p", "And God said", "-n", "5", "--stats"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out.rfind("And God said", 0), 0u) << result.out;
  EXPECT_NE(result.err.find("tokens/s"), std::string::npos) << result.err;
}

TEST(Cli, StaysWithinItsMemory) {
  const size_t budget = 256 << 20;
  const ProgramResult result = fovea({"generate", kModels + "llama", "-p", "And God said", "-n",
                                      "200", "--kv-memory", std::to_string(budget)});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const size_t weights = fs::file_size(kModels + "llama/model.safetensors");
  EXPECT_LE(result.peak_rss_bytes, weights + budget + (200u << 20));
}

TEST(Cli, NamesTheDamagedTensor) {
  const DamagedModel model;
  const uintmax_t size = fs::file_size(model.file("model.safetensors"));
  fs::resize_file(model.file("model.safetensors"), size - 1000);
  const ProgramResult truncated = fovea({"generate", model.folder(), "-p", "x"});
  expect_refused(truncated, {"model.safetensors", "model.", "bytes"});
  expect_one_line(truncated);
}

TEST(Cli, NamesTheOverflowingTensor) {
  const DamagedModel model;
  model.edit_header("[2048,128]", "[2e9,2e99]");
  expect_refused(fovea({"generate", model.folder(), "-p", "x"}), {"model.embed_tokens.weight"});
}

TEST(Cli, ListsTheKnownArchitectures) {
  const DamagedModel model;
  nlohmann::json config = nlohmann::json::parse(model.read("config.json"));
  config["architectures"] = {"MambaForCausalLM"};
  model.write("config.json", config.dump());
  const ProgramResult result = fovea({"generate", model.folder(), "-p", "x"});
  expect_refused(result, {"MambaForCausalLM", "LlamaForCausalLM", "DeepseekV3ForCausalLM"});
  expect_one_line(result);
}

TEST(Cli, SaysBothLengthsOfATooLongPrompt) {
  std::string tokens = "5";
  for (int i = 1; i < 300; ++i) tokens += ",5";
  const ProgramResult result =
      fovea({"generate", kModels + "llama", "--tokens", tokens, "--max-context", "256", "-n", "4"});
  expect_refused(result, {"300", "256"});
  expect_one_line(result);
}

TEST(Cli, PrintsAllReasonsOfARequiredBackend) {
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--backend", "flash"}),
                 {"flash"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--backend", "nonsense"}),
                 {"nonsense", "cpu", "reference", "flash"});
}

TEST(Cli, RefusesWrongFlags) {
  expect_refused(fovea({"generate", kModels + "llama"}), {"--prompt"});
  expect_refused(fovea({"generate", "/nonexistent", "-p", "x"}), {"/nonexistent"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--kv-dtype", "int7"}),
                 {"--kv-dtype", "int7", "bf16"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--top-p", "1.5"}),
                 {"top_p", "1.5"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "-n", "-1"}), {"-1"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--page-size", "0"}),
                 {"page_size", "0"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--kv-memory", "1kB"}),
                 {"KV budget", "1024"});
  expect_refused(fovea({"frobnicate"}), {"frobnicate", "generate"});
  expect_refused(fovea({"bench", "attention", "--q-len", "5"}), {"--kv-len"});
  expect_refused(fovea({"bench", "attention", "--device", "gpu"}), {"'gpu'", "cpu, cuda, cuda:N"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--filter", "nothing"}),
                 {"--filter"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--baselines", "/nowhere.csv"}),
                 {"/nowhere.csv"});
}

TEST(Cli, SaysInOneLineWhatTheParserRefuses) {
  struct Line {
    std::vector<std::string> arguments;
    std::string wrong, help;
  };
  for (const Line& line : std::vector<Line>{
           {{}, "subcommand", "fovea --help"},
           {{"generate"}, "model", "fovea generate --help"},
           {{"generate", kModels + "llama", "--bogus"}, "--bogus", "fovea generate --help"},
           {{"generate", "m", "--seed", "abc"}, "--seed = abc", "fovea generate --help"},
           {{"explain", "--require", "flash"}, "--require", "fovea explain --help"},
           {{"bench", "attention", "--phase", "x"}, "--phase: x", "fovea bench attention --help"},
       }) {
    const ProgramResult result = fovea(line.arguments);
    expect_refused(result, {"fovea: ", line.wrong, line.help});
    expect_one_line(result);
  }
}

TEST(Cli, RefusesSizesThatAreNone) {
  for (const std::string size :
       {"0", "-5", "5XB", "MB", "1.5GB", "99999999999999999999999", "20000000TB", "1000 000"}) {
    SCOPED_TRACE(size);
    const ProgramResult result =
        fovea({"generate", kModels + "llama", "-p", "x", "-n", "1", "--kv-memory=" + size});
    expect_refused(result, {"--kv-memory", "'" + size + "'", "512MB"});
    expect_one_line(result);
  }
  for (const std::string size : {"4194304", "4mb", "4M", "4MiB", "4096k", "1Gb"}) {
    EXPECT_EQ(
        fovea({"generate", kModels + "llama", "-p", "x", "-n", "1", "--kv-memory", size}).exit_code,
        0)
        << size;
  }
}

// Lists take one value a flag, so that the model may follow them.
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

TEST(Cli, NamesTheEmptyEntryOfAList) {
  for (const std::string list : {"1,,2", ",1", "1,", ",", ""}) {
    const ProgramResult result = fovea({"generate", kModels + "llama", "--tokens", list});
    expect_refused(result, {"--tokens", "'" + list + "' has an empty entry"});
    expect_one_line(result);
  }
  expect_refused(fovea({"check", kModels + "llama", "--kv-dtypes", "fp32,"}), {"--kv-dtypes"});
  expect_refused(fovea({"bench", "attention", "--threads", "1,,2"}), {"--threads", "'1,,2'"});
  expect_refused(fovea({"bench", "attention", "--state", "burst,foo"}),
                 {"--state", "foo", "burst"});
  expect_refused(fovea({"generate", kModels + "llama", "--tokens", "1,x"}), {"--tokens", "1,x"});
}

TEST(Cli, SaysWhenOutputIsLost) {
  const std::string generate = "generate " + kModels + "llama -p x -n 4";
  for (const std::string& arguments : {generate, generate + " --json", std::string("explain"),
                                       std::string("backends --json"), std::string("env")}) {
    SCOPED_TRACE(arguments);
    const ProgramResult full = fovea_redirected(arguments, "> /dev/full");
    EXPECT_EQ(full.exit_code, 2);
    EXPECT_NE(full.err.find("No space left"), std::string::npos) << full.err;
    expect_one_line(full);
    EXPECT_EQ(fovea_redirected(arguments, ">&-").exit_code, 2);
  }
  // A reader that has read enough ends the program quietly.
  const ProgramResult enough = run_program(
      {"/bin/sh", "-c", "'" FOVEA_CLI "' " + generate + "000 --ignore-eos | head -c 5"});
  EXPECT_EQ(enough.out.size(), 5u);
  EXPECT_EQ(enough.err, "");
}

// Long enough that no signal comes after the end.
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
    // No token has less than a byte: as many as there are bytes give all the text there was.
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

TEST(Cli, NamesThePromptFileThatCannotBeRead) {
  for (const std::string file : {"/nonexistent", "/"}) {
    const ProgramResult result = fovea({"generate", kModels + "llama", "--prompt-file", file});
    expect_refused(result, {"--prompt-file", file});
    expect_one_line(result);
  }
}

TEST(Cli, NamesThePromptOfSeveralThatIsWrong) {
  const ProgramResult result = fovea({"generate", kModels + "llama", "-p", "x", "-p", ""});
  expect_refused(result, {"request 2 of 2", "0 tokens"});
  expect_one_line(result);
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
}

TEST(Cli, RefusesFlagsThatWouldChangeNothing) {
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--logprobs", "2"}), {"--json"});
  expect_refused(fovea({"explain", "--model", kModels + "llama", "--window", "8"}),
                 {"--window", "--model"});
  expect_refused(fovea({"kernels", "list", "--pack", "/nonexistent"}), {"/nonexistent"});
  expect_refused(fovea({"bench", "attention", "--seconds", "-1"}), {"--seconds"});
  expect_refused(fovea({"bench", "attention", "--filter", "decode"}),
                 {"--filter", "--device cuda"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--quick"}), {"--quick", "cpu"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--phase", "decode"}),
                 {"--phase", "--kv-len"});
  expect_refused(fovea({"bench", "attention", "--kv-len", "64", "--quick"}),
                 {"--quick", "--kv-len"});
  expect_refused(fovea({"bench", "ceilings", "--device", "cpu"}), {"'cpu'", "cuda"});
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

TEST(Cli, SaysThatTheDeviceToCheckOnIsNotThere) {
  expect_refused(fovea({"check", kModels + "llama", "--device", "cuda:99"}), {"cuda"});
}

TEST(Cli, OneDocumentForAllThreadCounts) {
  std::vector<std::string> command = {"bench", "attention", "--kv-len", "64", "--seconds",
                                      "0.01",  "--threads", "1,2",      "-o"};
  command.push_back("json");
  const ProgramResult json = fovea(command);
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const nlohmann::json rows = nlohmann::json::parse(json.out)["results"];
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1]["threads"], 2);
  command.back() = "csv";
  const std::string csv = fovea(command).out;
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 3) << csv;
}

TEST(Cli, TablesAndJson) {
  const ProgramResult environment = fovea({"env", "--json"});
  EXPECT_EQ(environment.exit_code, 0);
  EXPECT_TRUE(nlohmann::json::parse(environment.out).contains("processor"));
  const ProgramResult backends = fovea({"backends", "--json"});
  EXPECT_EQ(backends.exit_code, 0);
  EXPECT_GE(nlohmann::json::parse(backends.out).size(), 2u);
  const ProgramResult explain = fovea({"explain", "--window", "128", "--sinks", "--json"});
  EXPECT_EQ(explain.exit_code, 0) << explain.err;
  EXPECT_TRUE(nlohmann::json::parse(explain.out).contains("chosen"));
  const ProgramResult model = fovea({"explain", "--model", kModels + "gemma2", "--json"});
  EXPECT_EQ(model.exit_code, 0) << model.err;
  EXPECT_EQ(nlohmann::json::parse(model.out).at(1).at("chosen"), "cpu");
  EXPECT_EQ(fovea({"--help"}).exit_code, 0);
  EXPECT_EQ(fovea({"--version"}).exit_code, 0);
}

TEST(Cli, ExplainsEveryKind) {
  for (const char* kind : {"mha", "mla", "gated_delta_net", "mamba2"}) {
    EXPECT_EQ(fovea({"explain", "--kind", kind}).exit_code, 0) << kind;
  }
}

TEST(Cli, ExplainsEveryScope) {
  for (const char* scope : {"decoder", "ragged", "encoder", "encoder_cache", "cross"}) {
    const ProgramResult result = fovea({"explain", "--scope", scope, "--json"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(nlohmann::json::parse(result.out)["chosen"], "cpu") << scope;
  }
  expect_refused(fovea({"explain", "--prefix-levels", "9"}), {"prefix_levels is 9"});
}

TEST(Cli, ListsTheKernelsAndNamesAMissingPack) {
  const ProgramResult result = fovea({"kernels", "list", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::set<std::string> names, families;
  for (const nlohmann::json& kernel : nlohmann::json::parse(result.out)) {
    EXPECT_TRUE(names.insert(kernel["name"]).second) << kernel["name"];
    families.insert(kernel["family"]);
  }
  for (const char* family : {"sm90/decode", "sm90/prefill", "sm90/mla_decode", "portable/attention",
                             "portable/mla_decode"}) {
    EXPECT_TRUE(families.contains(family)) << family;
  }
  for (const char* what : {"list", "report"}) {
    expect_refused(fovea({"kernels", what, "--pack", "/nowhere/kernels.pack"}),
                   {"/nowhere/kernels.pack"});
  }
}

// Needs NVRTC and no GPU; without it the reason is said.
TEST(Cli, BuildsKernelsOnceAndReportsThem) {
  const std::string pack = ::testing::TempDir() + "cli_test_" + std::to_string(getpid()) + ".pack";
  const std::vector<std::string> build = {"kernels", "build",         "--pack", pack,
                                          "--only",  "measure/empty", "--json"};
  const nlohmann::json environment = nlohmann::json::parse(fovea({"env", "--json"}).out);
  if (environment["kernel_compiler"] != "NVRTC") {
    expect_refused(fovea(build), {environment["kernel_compiler"]});
    return;
  }
  const auto bytes = [&] {
    std::ifstream file(pack, std::ios::binary);
    return std::string{std::istreambuf_iterator<char>(file), {}};
  };
  ASSERT_EQ(fovea(build).exit_code, 0);
  const std::string built = bytes();
  ASSERT_EQ(fovea(build).exit_code, 0);
  EXPECT_EQ(bytes(), built) << "compiled again what was there";  // compilation times are in it
  const ProgramResult report = fovea({"kernels", "report", "--json", "--pack", pack});
  int packed = 0;
  for (const nlohmann::json& kernel : nlohmann::json::parse(report.out)) {
    if (!kernel["packed"]) continue;
    ++packed;
    EXPECT_EQ(kernel["family"], "measure/empty");
    EXPECT_GT(kernel["registers"], 0);
    EXPECT_GT(kernel["cubin_bytes"], 0);
    EXPECT_EQ(kernel["spill_bytes"], 0);
  }
  EXPECT_GT(packed, 0);

  // As if the assembler had said so.
  std::string noted = built;
  const std::string nothing = R"("losses":"")", note = R"("losses":"(C7510) serialized")";
  noted.replace(noted.find(nothing), nothing.size(), note);
  uint64_t index_bytes = 0;
  std::memcpy(&index_bytes, &noted[8], sizeof(index_bytes));
  index_bytes += note.size() - nothing.size();
  std::memcpy(&noted[8], &index_bytes, sizeof(index_bytes));
  std::ofstream(pack, std::ios::binary) << noted;
  const ProgramResult refused = fovea(build);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_NE(refused.err.find("measure/empty"), std::string::npos) << refused.err;
  EXPECT_NE(refused.err.find("(C7510) serialized"), std::string::npos) << refused.err;
  fs::remove(pack);
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

TEST(Cli, BenchChecksWhatItTimes) {
  for (const char* dtype : {"fp32", "fp16", "bf16"}) {
    const ProgramResult result = fovea({"bench", "attention", "--kv-len", "300", "--batch", "2",
                                        "--head-dim", "64", "--seconds", "0.01", "--threads", "1",
                                        "--dtype", dtype, "--kv-dtype", dtype, "-o", "json"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const nlohmann::json row = nlohmann::json::parse(result.out)["results"][0];
    EXPECT_GT(row["seconds"], 0);
    EXPECT_LT(row["error"], 5e-3) << dtype;
  }
}

}  // namespace
}  // namespace fovea::test
