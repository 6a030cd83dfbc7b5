// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/mapped_file.h"
#include "fovea/error.h"
#include "support/count_allocations.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

namespace fs = std::filesystem;

std::string with_length(std::string_view header, std::string_view data, uint64_t length) {
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes.append(header).append(data);
}

// Returns a file with that header and `data_bytes` bytes 0, 1, 2, ...
std::string file_of(std::string_view header, size_t data_bytes) {
  std::string data(data_bytes, '\0');
  for (size_t i = 0; i < data_bytes; ++i) data[i] = static_cast<char>(i);
  return with_length(header, data, header.size());
}

SafetensorsFile parse(const std::string& bytes) {
  return SafetensorsFile::parse(std::as_bytes(std::span(bytes)), "test.safetensors");
}

void expect_corrupt(std::string_view header, size_t data_bytes,
                    std::initializer_list<std::string_view> parts) {
  test::expect_error(ErrorCode::corrupt_file, parts, [&] { parse(file_of(header, data_bytes)); });
}

// A folder of its own for each test, removed afterwards.
class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() / fmt::format("fovea_{}_{}", test->name(), ::getpid());
    fs::create_directories(folder_);
  }
  ~CheckpointTest() override { fs::remove_all(folder_); }

  void write(const std::string& name, std::string_view bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }
  Checkpoint open() { return Checkpoint::open(folder_.string()); }
  void expect_open_error(ErrorCode code, std::initializer_list<std::string_view> parts) {
    test::expect_error(code, parts, [&] { open(); });
  }

  fs::path folder_;
};

TEST(Safetensors, ReadsTensorsInAnyOrder) {
  const std::string bytes =
      file_of(R"({"__metadata__":{"format":"pt"},)"
              R"("b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
              R"("none":{"dtype":"F32","shape":[9223372036854775807,8,0],"data_offsets":[4,4]},)"
              R"("scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   )",
              16);
  const auto file = parse(bytes);
  ASSERT_EQ(file.tensors().size(), 3u);
  const StoredTensor& b = *file.find("b");
  EXPECT_EQ(b.dtype, DType::bf16);
  EXPECT_EQ(b.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(b.bytes, 12u);
  EXPECT_EQ(b.data[0], std::byte{4});
  EXPECT_EQ(file.find("scalar")->bytes, 4u);
  EXPECT_EQ(file.find("none")->bytes, 0u);
  EXPECT_EQ(file.find("other"), nullptr);
  EXPECT_TRUE(parse(file_of("{}", 0)).tensors().empty());
}

// The reference accepts these headers too.
TEST(Safetensors, PassesOverWhatItDoesNotNeed) {
  const std::string fields = R"("dtype":"U8","shape":[1],"data_offsets":[0,1])";
  for (const std::string& header : {
           R"({"__metadata__":null,"x":{)" + fields + "}}",
           R"({"__metadata__":{},"x":{)" + fields + "}}",
           R"({"x":{"extra":{"dtype":[{"shape":null}],"shape":2.5},)" + fields + "}}",
           R"({"x":{)" + fields + R"(,"a":[[],[{}]],"b":null,"c":true,"d":-1,"e":"F32","f":7}})",
           "\n {\"x\":{" + fields + "}}  \n",
       }) {
    const SafetensorsFile file = parse(file_of(header, 1));
    ASSERT_EQ(file.tensors().size(), 1u) << header;
    EXPECT_EQ(file.find("x")->shape, std::vector<int64_t>{1});
  }
}

TEST(Safetensors, RefusesANulInTheHeader) {
  using namespace std::string_literals;
  expect_corrupt("{}\0\0"s, 0, {"byte 2 of the header is NUL"});
  expect_corrupt("\0{}"s, 0, {"byte 0 of the header is NUL"});
}

// Messages contain neither escape sequences for a terminal nor names of any length.
TEST(Safetensors, QuotesWhatAFileHolds) {
  expect_corrupt(R"({"\u001b[2J'":7})", 0, {R"(tensor '\x1b[2J\'')"});
  expect_corrupt(R"({"x":{"dtype":"\u009b2J"}})", 0, {R"(unknown dtype '\u009b2J')"});
  const std::string bytes = file_of("[]", 0);
  test::expect_error(ErrorCode::corrupt_file, R"(a\x1b[2J: )",
                     [&] { SafetensorsFile::parse(std::as_bytes(std::span(bytes)), "a\033[2J"); });
}

TEST(Safetensors, RefusesOtherDtypesOnlyWhenAsked) {
  const auto file = parse(file_of(R"({"mask":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]},)"
                                  R"("x":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})",
                                  4));
  EXPECT_NE(file.find("x"), nullptr);
  EXPECT_TRUE(file.contains("mask"));
  test::expect_error(ErrorCode::unsupported, {"'mask'", "BOOL"}, [&] { file.find("mask"); });
}

TEST(Safetensors, ChecksTheHeaderLength) {
  const auto refuse = [](const std::string& bytes, std::string_view part) {
    test::expect_error(ErrorCode::corrupt_file, {"test.safetensors", part}, [&] { parse(bytes); });
  };
  refuse("", "0 bytes");
  refuse(std::string(7, '\0'), "7 bytes");
  refuse(with_length("{}", "", 100'000'001), "100000001 bytes, the limit is 100000000");
  refuse(with_length("{}", "", UINT64_MAX), "18446744073709551615");
  refuse(with_length("{}", "", 3), "only 2 bytes follow");
  refuse(with_length("", "", 0), "header");
  refuse(with_length("{", "", 1), "header");
  refuse(with_length("{}{}", "", 4), "header");
}

TEST(Safetensors, ChecksOffsetsAndShapes) {
  const auto x = [](std::string_view shape, std::string_view offsets) {
    return fmt::format(R"({{"x":{{"dtype":"F32","shape":{},"data_offsets":{}}}}})", shape, offsets);
  };
  // 2^62 * 4 bytes and 2^32 * 2^32 wrap to small numbers.
  expect_corrupt(x("[4611686018427387904]", "[0,0]"), 0,
                 {"'x'", "4611686018427387904", "no countable"});
  expect_corrupt(x("[4294967296,4294967296]", "[0,0]"), 0, {"'x'", "[4294967296, 4294967296]"});
  expect_corrupt(x("[9223372036854775808]", "[0,0]"), 0,
                 {"'x'", "9223372036854775808", "does not fit 63 bits"});
  expect_corrupt(x("[1]", "[8,4]"), 8, {"'x'", "[8, 4]", "backwards"});
  expect_corrupt(x("[1]", "[-4,0]"), 8, {"'x'", "-4"});
  expect_corrupt(x("[1]", "[0.0,4.0]"), 8, {"'x'", "0.0"});
  expect_corrupt(x("[1]", "[0,18446744073709551616]"), 8, {"'x'"});
  expect_corrupt(x("[-1]", "[0,4]"), 4, {"'x'", "-1"});
  expect_corrupt(x("[2]", "[0,4]"), 4, {"'x'", "needs 8 bytes", "hold 4"});
  expect_corrupt(x("[2]", "[0,8]"), 7, {"'x'", "[0, 8]", "7 bytes"});
  expect_corrupt(x("[1]", "[0]"), 4, {"'x'"});
  expect_corrupt(x("[1]", "[0,4,8]"), 4, {"'x'", "more than two numbers"});
  expect_corrupt(x("[1]", "[0,4],\"data_offsets\":[0,4]"), 4, {"'x'", "two data_offsets"});
  expect_corrupt(x("[1],\"dtype\":\"F32\"", "[0,4]"), 4, {"'x'", "two dtype"});
  expect_corrupt(x("[[1]]", "[0,4]"), 4, {"'x'", "an array"});
  expect_corrupt(x("\"1\"", "[0,4]"), 4, {"'x'", "the text '1'"});
  expect_corrupt(x("[\"F32\"]", "[0,4]"), 4, {"'x'", "the text 'F32'"});
  expect_corrupt(R"({"x":"F32"})", 0, {"'x'", "the text 'F32'"});
  expect_corrupt(R"({"__metadata__":{},"__metadata__":{}})", 0, {"__metadata__", "twice"});
  expect_corrupt(x("[1],\"shape\":[1]", "[0,4]"), 4, {"'x'", "two shape"});
  expect_corrupt(R"({"x":null})", 0, {"'x'", "null"});
  expect_corrupt(R"({"__metadata__":null,"__metadata__":{}})", 0, {"__metadata__", "twice"});
  expect_corrupt(x("[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, {"'x'", "dimensions"});
  expect_corrupt(R"({"x":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}})", 1, {"'x'", "'Q4'"});
  expect_corrupt(R"({"x":{"shape":[1],"data_offsets":[0,1]}})", 1, {"'x'", "no dtype"});
  expect_corrupt(R"({"x":{"dtype":"U8","data_offsets":[0,1]}})", 1, {"'x'", "no shape"});
  expect_corrupt(R"({"x":{"dtype":"U8","shape":[]}})", 1, {"'x'", "data_offsets"});
  expect_corrupt(R"({"x":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, {"'x'", "F4"});
  expect_corrupt(R"({"x":7})", 0, {"'x'", "7"});
  expect_corrupt(R"({"__metadata__":{"a":{}}})", 0, {"__metadata__"});
  expect_corrupt(R"({"x":{"dtype":"U8","sha)", 0, {"'x'", "header"});
}

TEST(Safetensors, ChecksThatTheDataIsCoveredOnce) {
  const auto pair = [](int b_begin, int b_end) {
    return fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},)"
                       R"("b":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}}})",
                       b_end - b_begin, b_begin, b_end);
  };
  EXPECT_EQ(parse(file_of(pair(4, 8), 8)).tensors().size(), 2u);
  expect_corrupt(pair(3, 8), 8, {"'b'", "'a'", "byte 3", "overlap"});
  expect_corrupt(pair(0, 4), 4, {"'b'", "overlap"});
  expect_corrupt(pair(5, 8), 8, {"'b'", "byte 5", "gap"});
  expect_corrupt(pair(4, 8), 9, {"'b'", "byte 8", "9 bytes"});
  expect_corrupt("{}", 1, {"byte 0", "1 bytes"});
  expect_corrupt(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
                 R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                 1, {"'a'", "twice"});
}

TEST(Safetensors, SurvivesDepthAndLongNames) {
  expect_corrupt("{\"x\":" + std::string(1'000'000, '['), 0, {"'x'", "an array"});
  expect_corrupt("{\"x\":" + std::string(1'000'000, '{'), 0, {"'x'"});
  expect_corrupt("{\"x\":{\"extra\":" + std::string(1'000'000, '['), 0,
                 {"'x'", "'extra' is nested deeper than 128"});
  const std::string bytes = file_of("{\"" + std::string(1'000'000, 'n') + "\":1}", 0);
  EXPECT_LT(test::error_of([&] { parse(bytes); }, ErrorCode::corrupt_file).size(), 1000u);
}

TEST_F(CheckpointTest, ReadsShards) {
  write("model.safetensors.index.json",
        R"({"metadata":{},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  write("one.safetensors", file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4));
  const std::string b = file_of(R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  expect_open_error(ErrorCode::io, {"two.safetensors", "No such file"});
  write("two.safetensors", b);
  const Checkpoint checkpoint = open();
  EXPECT_EQ(checkpoint.bytes(), 12u);
  const std::array<int64_t, 1> two = {2}, three = {3};
  EXPECT_EQ(checkpoint.tensor("b", two).data[7], std::byte{7});
  test::expect_error(ErrorCode::corrupt_file, {"'b'", "[2]", "[3]"},
                     [&] { checkpoint.tensor("b", three); });
  test::expect_error(ErrorCode::corrupt_file, {"'c'", "missing", "[3]"},
                     [&] { checkpoint.tensor("c", three); });
  write("one.safetensors", b);
  expect_open_error(ErrorCode::corrupt_file, {"'a'", "is not in", "one.safetensors"});
}

// A shard, before or after the right one, has a stale copy of a tensor that the index takes from
// another.
TEST_F(CheckpointTest, TheIndexDecidesWhichShardHasATensor) {
  const auto shard = [](uint8_t value) {
    const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                               R"("b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})";
    return with_length(header, std::string(2, static_cast<char>(value)), header.size());
  };
  write("one.safetensors", shard(1));
  write("two.safetensors", shard(2));
  for (const int shard_of_a : {1, 2}) {
    const std::array<const char*, 2> names = {"one.safetensors", "two.safetensors"};
    write("model.safetensors.index.json",
          fmt::format(R"({{"weight_map":{{"a":"{}","b":"{}"}}}})", names[shard_of_a - 1],
                      names[2 - shard_of_a]));
    const Checkpoint checkpoint = open();
    EXPECT_EQ(std::to_integer<int>(checkpoint.find("a")->data[0]), shard_of_a);
    EXPECT_EQ(std::to_integer<int>(checkpoint.find("b")->data[0]), 3 - shard_of_a);
    EXPECT_EQ(checkpoint.bytes(), 2u);
    EXPECT_EQ(checkpoint.note(), "");
  }
}

TEST_F(CheckpointTest, SaysWhichOfTwoCheckpointsIsRead) {
  const std::string a = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  write("model.safetensors", file_of(a, 1));
  EXPECT_EQ(open().note(), "");
  write("model.safetensors.index.json", R"({"weight_map":{"a":"missing.safetensors"}})");
  const std::string note = open().note();
  EXPECT_NE(note.find("model.safetensors is read"), note.npos) << note;
  EXPECT_NE(note.find("model.safetensors.index.json and its shards are not"), note.npos) << note;
}

TEST_F(CheckpointTest, RefusesBrokenIndices) {
  const auto refuse = [&](std::string_view text, std::string_view part) {
    write("model.safetensors.index.json", text);
    expect_open_error(ErrorCode::corrupt_file, {"model.safetensors.index.json", part});
  };
  using namespace std::string_view_literals;
  refuse("", "parse error");
  refuse("7", "weight_map");
  refuse("{}", "weight_map");
  refuse(R"({"weight_map":{}})", "weight_map");
  refuse(R"({"weight_map":["a"]})", "weight_map");
  refuse(R"({"metadata":{"weight_map":{"a":"b"}}})", "weight_map");
  refuse(R"({"weight_map":{"a":"x","a":"x"}})", "tensor 'a' is there twice");
  refuse(R"({"weight_map":{"a":null}})", "tensor 'a' is null");
  refuse(R"({"weight_map":{"a":{"b":"c"}}})", "tensor 'a' is an object");
  refuse(R"({"weight_map":{"a":["b"]}})", "tensor 'a' is an array");
  refuse(R"({"weight_map":{"\u001b":1.5}})", R"(tensor '\x1b' is 1.5)");
  refuse("{\"weight_map\":{\"a\":\"x\"}}\0"sv, "byte 24 is NUL");
  refuse("{\"metadata\":" + std::string(100'000, '['), "deeper than 64");
  refuse(R"({"weight_map":{"a":"../\u001b[2J"}})", R"('../\x1b[2J', must be a plain file name)");
}

// A shard whose name has escape sequences is opened, and messages name it without them.
TEST_F(CheckpointTest, PrintsNamesOfShardsWithoutEscapes) {
  write("model.safetensors.index.json", R"({"weight_map":{"a":"\u001b[2J"}})");
  expect_open_error(ErrorCode::io, {R"(/\x1b[2J: cannot open)"});
  write("\033[2J", file_of("{}", 0));
  expect_open_error(ErrorCode::corrupt_file, {"'a'", R"(/\x1b[2J, but is not in it)"});
}

TEST_F(CheckpointTest, ReadsLongIndicesInLittleMemory) {
  std::string text = "{\"weight_map\":{\"a\":\"one.safetensors\"";
  for (int i = 0; i < 300'000; ++i) text += fmt::format(",\"{}\":\"s\"", i);
  text += "}}";
  test::allocated_bytes = 0;
  const CheckpointIndex index = read_checkpoint_index(text, "index.json");
  EXPECT_EQ(index.entries.size(), 300'001u);
  EXPECT_EQ(index.shards, (std::vector<std::string>{"one.safetensors", "s"}));
  EXPECT_LT(test::allocated_bytes, 12 * static_cast<int64_t>(text.size()));
}

TEST_F(CheckpointTest, ShardsStayInTheFolder) {
  for (const char* shard : {"../x", "/etc/passwd", "", ".", "..", "a/b", "a\\\\b", "a\\u0000b"}) {
    write("model.safetensors.index.json", fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", shard));
    expect_open_error(ErrorCode::corrupt_file, {"'a'", "plain file name"});
  }
  write("model.safetensors.index.json", R"({"weight_map":{"a":1}})");
  expect_open_error(ErrorCode::corrupt_file, {"'a'", "1"});
  write("model.safetensors.index.json", R"([])");
  expect_open_error(ErrorCode::corrupt_file, {"weight_map"});
}

TEST_F(CheckpointTest, NamesMissingAndUnreadableFiles) {
  expect_open_error(ErrorCode::io, {folder_.string(), "model.safetensors.index.json"});
  write("model.safetensors", "");
  expect_open_error(ErrorCode::corrupt_file, {"model.safetensors", "0 bytes"});
  fs::remove(folder_ / "model.safetensors");
  fs::create_directory(folder_ / "model.safetensors");
  expect_open_error(ErrorCode::io, {"model.safetensors", "not a regular file"});
  const std::string pipe = (folder_ / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  test::expect_error(ErrorCode::io, "not a regular file", [&] { MappedFile file(pipe); });
}

TEST_F(CheckpointTest, EmptyFilesAreMapped) {
  write("empty", "");
  EXPECT_TRUE(MappedFile((folder_ / "empty").string()).bytes().empty());
  write("full", "text");
  const MappedFile full((folder_ / "full").string());
  EXPECT_EQ(full.text(), "text");
}

TEST(Checkpoint, ReadsTheModelsOfTheRepository) {
  const fs::path models = fs::path(FOVEA_SOURCE_DIR) / "testdata/models";
  for (const auto& entry : fs::directory_iterator(models)) {
    const Checkpoint checkpoint = Checkpoint::open(entry.path().string());
    EXPECT_GT(checkpoint.bytes(), 1'000'000u) << entry.path();
    EXPECT_NE(checkpoint.find("model.embed_tokens.weight"), nullptr) << entry.path();
  }
}

}  // namespace
}  // namespace fovea
