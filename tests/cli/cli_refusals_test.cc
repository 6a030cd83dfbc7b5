// SPDX-License-Identifier: Apache-2.0
// Input that the command line tool refuses. Every refusal names the fault in one line.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/run_fovea.h"

namespace fovea::test {
namespace {

namespace fs = std::filesystem;

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
  // Changes what the header of model.safetensors states about a tensor.
  void edit_header(const std::string& tensor, const char* field,
                   const nlohmann::json& value) const {
    const std::string bytes = read("model.safetensors");
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    nlohmann::json header = nlohmann::json::parse(bytes.substr(sizeof(length), length));
    header.at(tensor)[field] = value;
    const std::string text = header.dump();
    const uint64_t new_length = text.size();
    std::string edited(sizeof(new_length), 0);
    std::memcpy(edited.data(), &new_length, sizeof(new_length));
    write("model.safetensors", edited + text + bytes.substr(sizeof(length) + length));
  }

 private:
  fs::path path_;
};

TEST(Cli, NamesTheTruncatedTensor) {
  const DamagedModel model;
  const uintmax_t size = fs::file_size(model.file("model.safetensors"));
  fs::resize_file(model.file("model.safetensors"), size - 1000);
  const ProgramResult result = fovea({"generate", model.folder(), "-p", "x"});
  // The last tensor of the file, and the end of its bytes.
  expect_refused(
      result, {"'model.layers.3.self_attn.v_proj.weight'", "[2361344, 2394112]", "2393368 bytes"});
  expect_one_line(result);
}

TEST(Cli, NamesTheOverlappingTensor) {
  const DamagedModel model;
  model.edit_header("model.layers.0.mlp.gate_proj.weight", "data_offsets", {614144, 704256});
  const ProgramResult result = fovea({"generate", model.folder(), "-p", "x"});
  expect_refused(result, {"'model.layers.0.mlp.gate_proj.weight'", "byte 614144", "overlap",
                          "'model.layers.0.mlp.down_proj.weight'", "byte 614656"});
  expect_one_line(result);
}

TEST(Cli, NamesTheOverflowingTensor) {
  struct Edit {
    const char* field;
    nlohmann::json value;
    std::string bytes;
  };
  for (const auto& [field, value, bytes] : std::vector<Edit>{
           {"shape", {4096, 128}, "needs 1048576 bytes, data_offsets [0, 524288] hold 524288"},
           {"shape", {uint64_t{1} << 32, uint64_t{1} << 32}, "no countable number of bytes"},
           {"shape", {2048, 1e99}, "1e+99"},
           {"data_offsets", {0, UINT64_MAX}, "reach past the 2394368 bytes of data"}}) {
    const DamagedModel model;
    model.edit_header("model.embed_tokens.weight", field, value);
    const ProgramResult result = fovea({"generate", model.folder(), "-p", "x"});
    expect_refused(result, {"'model.embed_tokens.weight'", bytes});
    expect_one_line(result);
  }
}

TEST(Cli, ListsTheKnownArchitectures) {
  const DamagedModel model;
  nlohmann::json config = nlohmann::json::parse(model.read("config.json"));
  config["architectures"] = {"RwkvForCausalLM"};
  model.write("config.json", config.dump());
  const ProgramResult result = fovea({"generate", model.folder(), "-p", "x"});
  expect_refused(result, {"RwkvForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM",
                          "Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM",
                          "Llama4ForCausalLM", "Qwen3NextForCausalLM"});
  expect_one_line(result);
}

TEST(Cli, SaysWhichOfTwoCheckpointsIsRead) {
  const DamagedModel model;
  model.write("model.safetensors.index.json", R"({"weight_map":{"a":"b"}})");
  const ProgramResult result =
      fovea({"generate", model.folder(), "-p", "x", "-n", "1", "--max-context", "64"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.err.find("model.safetensors is read"), std::string::npos) << result.err;
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
  for (const std::string name : {"flash", "fa3"}) {
    const ProgramResult result =
        fovea({"generate", kModels + "llama", "-p", "x", "--backend", name});
    expect_refused(result, {"'" + name + "' was required", "flash: rejected",
                            "device is the CPU, accepted: NVIDIA GPUs of sm_90",
                            "q_dtype is fp32, accepted: fp16",
                            "cache dtype is fp32, accepted: fp16", "accepted by: cpu, reference"});
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 6) << result.err;
  }
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
  expect_refused(fovea({"bench", "attention", "--q-len", "5"}), {"--kv-len"});
  expect_refused(fovea({"bench", "attention", "--device", "gpu"}), {"'gpu'", "cpu, cuda, cuda:N"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--filter", "nothing"}),
                 {"--filter"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--baselines", "/nowhere.csv"}),
                 {"/nowhere.csv"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--save", "/nowhere/x"}),
                 {"--save", "/nowhere is not a writable folder"});
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
           {{"generate", "m", "--seed", "abc"}, "--seed: 'abc'", "fovea generate --help"},
           {{"explain", "--require", "flash"}, "--require", "fovea explain --help"},
           {{"generate", "m", "--seed", "-1"}, "--seed: '-1'", "fovea generate --help"},
           {{"generate", "m", "--seed", "99999999999999999999"}, "--seed: '9", "generate --help"},
           {{"generate", "m", "-n", "99999999999"}, "99999999999: not a number, or too", "--help"},
           {{"bench", "attention", "--phase", "x"}, "--phase: x", "fovea bench attention --help"},
       }) {
    const ProgramResult result = fovea(line.arguments);
    expect_refused(result, {"fovea: ", line.wrong, line.help});
    expect_one_line(result);
  }
}

// An unset variable of the shell does not request the default.
TEST(Cli, RefusesEmptyValues) {
  const std::vector<std::string> generate = {"generate", kModels + "llama", "-p", "x"};
  for (const std::string flag : {"--kv-memory", "--kv-dtype", "--decode-backend", "--prompt-file",
                                 "--backend", "--device", "--seed"}) {
    std::vector<std::string> arguments = generate;
    arguments.insert(arguments.end(), {flag, ""});
    const ProgramResult result = fovea(arguments);
    expect_refused(result, {flag.substr(flag.find_last_of('-') + 1)});
    expect_one_line(result);
  }
  expect_refused(fovea({"explain", "--model", ""}), {"model"});
  expect_refused(fovea({"explain", "--dtype", ""}), {"--dtype"});
  expect_refused(fovea({"bench", "attention", "--kv-len", "8", "--kv-dtype", ""}), {"--kv-dtype"});
}

TEST(Cli, ListsAllCommands) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"frobnicate"}, {"bench", "frobnicate"}, {"kernels", "frobnicate"}, {"--frobnicate"}}) {
    const ProgramResult result = fovea(arguments);
    const char* known = arguments[0] == "bench"     ? "ceilings, attention"
                        : arguments[0] == "kernels" ? "list, report, build"
                                                    : "generate, check, explain";
    expect_refused(result, {arguments.back(), known});
    expect_one_line(result);
  }
}

TEST(Cli, RefusesInvalidSizes) {
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

TEST(Cli, RefusesFlagsThatWouldChangeNothing) {
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--logprobs", "2"}), {"--json"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--no-cuda-graphs"}),
                 {"--no-cuda-graphs", "--device cuda"});
  expect_refused(fovea({"generate", kModels + "llama", "-p", "x", "--max-graph-requests", "8"}),
                 {"--max-graph-requests", "--device cuda"});
  expect_refused(fovea({"explain", "--model", kModels + "llama", "--window", "8"}),
                 {"--window", "--model"});
  expect_refused(fovea({"explain", "--model", kModels + "llama", "--device", "sm_90"}),
                 {"sm_90", "--model", "needs --kv-memory"});
  expect_refused(fovea({"explain", "--kv-memory", "1GB"}), {"--kv-memory needs --model"});
  expect_refused(fovea({"kernels", "list", "--pack", "/nonexistent"}), {"/nonexistent"});
  expect_refused(fovea({"bench", "attention", "--seconds", "-1"}), {"--seconds"});
  expect_refused(fovea({"bench", "attention", "--seconds", "nan"}), {"--seconds"});
  expect_refused(fovea({"bench", "attention", "--filter", "decode"}),
                 {"--filter", "--device cuda"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--quick"}), {"--quick", "cpu"});
  expect_refused(fovea({"bench", "attention", "--device", "cuda", "--phase", "decode"}),
                 {"--phase", "--kv-len"});
  expect_refused(fovea({"bench", "attention", "--kv-len", "64", "--quick"}),
                 {"--quick", "--kv-len"});
  expect_refused(fovea({"bench", "attention", "--turns"}), {"--turns", "--kv-len"});
  expect_refused(fovea({"bench", "attention", "--kv-len", "64", "--turns", "--seconds", "1"}),
                 {"--seconds", "--turns"});
  expect_refused(fovea({"bench", "attention", "--kv-len", "64", "--turns", "--threads", "1,2"}),
                 {"--threads", "--turns"});
  expect_refused(fovea({"bench", "ceilings", "--device", "cpu"}), {"'cpu'", "cuda"});
  expect_refused(fovea({"bench", "ceilings", "--output", "csv"}), {"--output", "csv"});
}

TEST(Cli, ExplainNamesTheFlagThatIsMissing) {
  const ProgramResult result = fovea({"explain", "--kind", "mla", "--head-dim", "100"});
  expect_refused(result, {"--head-dim-v", "--head-dim 100"});
  expect_one_line(result);
}

// There is no driver, or it does not start, as under AddressSanitizer, or there are too few GPUs.
TEST(Cli, SaysThatTheDeviceToCheckOnIsNotThere) {
  expect_refused(fovea({"check", kModels + "llama", "--device", "cuda:99"}),
                 {"device is 'cuda:99'"});
}

}  // namespace
}  // namespace fovea::test
