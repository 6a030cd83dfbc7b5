// SPDX-License-Identifier: Apache-2.0
#include "model/json_object.h"

#include <gtest/gtest.h>

#include <ctime>
#include <functional>
#include <new>
#include <string>

#include "fovea/error.h"
#include "support/count_allocations.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

JsonObject parse(std::string_view text) { return JsonObject::parse(text, "config.json"); }

void expect_corrupt(const std::function<void()>& action,
                    std::initializer_list<std::string_view> parts) {
  EXPECT_LT(test::error_of(action, ErrorCode::corrupt_file).size(), 1000u);
  test::expect_error(ErrorCode::corrupt_file, parts, action);
}

TEST(JsonObject, ReadsFields) {
  const JsonObject config =
      parse(R"({"layers":4,"theta":1e4,"whole":7,"tied":true,"name":"llama","none":null,)"
            R"("kinds":["a","b"],"eos":[1,2],"rope":{"factor":8.5,"deep":{"low":1}}})");
  EXPECT_EQ(config.integer("layers", 1, 4), 4);
  EXPECT_EQ(config.integer_or("none", 9, 0, 10), 9);
  EXPECT_EQ(config.integer_or("missing", 9, 0, 10), 9);
  EXPECT_EQ(config.number("theta", 0, 1e5), 10000.0);
  EXPECT_EQ(config.number("whole", 7, 7), 7.0);
  EXPECT_EQ(config.number_or("none", 0.5, 0, 1), 0.5);
  EXPECT_TRUE(config.boolean_or("tied", false));
  EXPECT_TRUE(config.boolean_or("missing", true));
  EXPECT_EQ(config.text("name"), "llama");
  EXPECT_EQ(config.text_or("missing", "x"), "x");
  EXPECT_EQ(config.texts("kinds"), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(config.integers("eos", 0, 9), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(config.integer_or_list("layers", 0, 9), (std::vector<int64_t>{4}));
  EXPECT_EQ(config.integer_or_list("eos", 0, 9), (std::vector<int64_t>{1, 2}));
  EXPECT_FALSE(config.has("none"));
  EXPECT_TRUE(config.has("rope"));
  EXPECT_EQ(config.object("rope").number("factor", 1, 10), 8.5);
}

TEST(JsonObject, ObjectsOutliveTheirParent) {
  const JsonObject low = parse(R"({"rope":{"deep":{"low":1}}})").object("rope").object("deep");
  EXPECT_EQ(low.integer("low", 0, 1), 1);
  expect_corrupt([&] { low.integer("low", 2, 3); }, {"rope.deep.low is 1", "from 2 to 3"});
}

TEST(JsonObject, NamesFieldValueAndLimit) {
  const JsonObject config = parse(
      R"({"n":4,"big":18446744073709551615,"f":4.5,"s":"x","list":[1,"two"],"o":{},"none":null})");
  expect_corrupt([&] { config.integer("n", 5, 9); }, {"config.json", "n is 4", "from 5 to 9"});
  expect_corrupt([&] { config.integer_or("n", 6, 5, 9); }, {"n is 4"});
  expect_corrupt([&] { config.integer("big", INT64_MIN, INT64_MAX); }, {"18446744073709551615"});
  expect_corrupt([&] { config.integer("f", 0, 9); }, {"f is 4.5", "integer"});
  expect_corrupt([&] { config.integer("s", 0, 9); }, {"s is \"x\""});
  expect_corrupt([&] { config.integer("missing", 0, 9); }, {"missing is missing"});
  expect_corrupt([&] { config.refuse("none", "set"); }, {"none is null, must be set"});
  expect_corrupt([&] { config.integer("none", 0, 9); }, {"none is null"});
  expect_corrupt([&] { config.number("s", 0, 1); }, {"s is \"x\"", "a number from 0 to 1"});
  expect_corrupt([&] { config.number("f", 0, 4.25); }, {"f is 4.5", "a number from 0 to 4.25"});
  expect_corrupt([&] { config.numbers("list", 0, 9); }, {"list[1] is \"two\""});
  expect_corrupt([&] { config.boolean_or("n", true); }, {"true or false"});
  expect_corrupt([&] { config.text("n"); }, {"n is 4", "string"});
  expect_corrupt([&] { config.texts("list"); }, {"list[0] is 1"});
  expect_corrupt([&] { config.integers("list", 0, 9); }, {"list[1] is \"two\""});
  expect_corrupt([&] { config.integers("n", 0, 9); }, {"array"});
  expect_corrupt([&] { config.object("list"); }, {"list is an array of 2", "object"});
  expect_corrupt([&] { config.number("o", 0, 1); }, {"o is an object"});
}

TEST(JsonObject, RefusesBrokenText) {
  expect_corrupt([] { parse(""); }, {"config.json", "parse error"});
  expect_corrupt([] { parse("[]"); }, {"an array of 0"});
  expect_corrupt([] { parse("{\"a\":1,}"); }, {"line 1, column 8"});
  expect_corrupt([] { parse("{\"a\":1} x"); }, {"column 9"});
  expect_corrupt([] { parse("{\"a\":1e999}"); }, {"1e999"});
  expect_corrupt([] { parse("{\"a\":NaN}"); }, {"column 6"});
  expect_corrupt([] { parse("{\"a\":\"\xff\"}"); }, {"UTF-8"});
  expect_corrupt([] { parse("{\"a\":1,\"b\":{\"a\":1},\"a\":2}"); }, {"'a'", "twice"});
  expect_corrupt([] { parse(std::string(10'000'001, ' ')); }, {"10000001 bytes", "10000000"});
  expect_corrupt([] { parse("{\"a\":" + std::string(1'000'000, '[')); }, {"deeper than 64"});
  const std::string deep = std::string(63, '[') + std::string(63, ']');
  EXPECT_TRUE(parse("{\"a\":" + deep + "}").has("a"));
  expect_corrupt([&] { parse("{\"a\":[" + deep + "]}"); }, {"deeper than 64"});
}

// Messages contain neither escape sequences for a terminal nor names of any length.
TEST(JsonObject, QuotesWhatAFileHolds) {
  const std::string huge(4'000'000, 'n');
  expect_corrupt([&] { parse("{\"" + huge + "\":1,\"" + huge + "\":2}"); },
                 {"'... (4000000 bytes)"});
  expect_corrupt([&] { parse("{\"a\":\"" + huge + "\"}").integer("a", 0, 1); }, {"bytes)"});
  expect_corrupt([] { parse("{\"a\":\"\\u001b[2J\"}").integer("a", 0, 1); }, {"\\u001b[2J"});
  expect_corrupt([] { parse("{\"\\u001b\":{\"b\":1}}").object("\x1b").integer("b", 2, 3); },
                 {"\\x1b.b is 1"});
  expect_corrupt([] { JsonObject::parse("[]", "\x1b[2J/config.json"); }, {"\\x1b[2J/config.json"});
}

TEST(JsonObject, RefusesANulAndTextAfterIt) {
  using namespace std::string_literals;
  expect_corrupt([] { parse("{\"a\":1}\0"s); }, {"byte 7 is NUL"});
  expect_corrupt([] { parse("{\"a\":1}\0{\"a\":2}"s); }, {"byte 7 is NUL"});
  expect_corrupt([] { parse("\0"s); }, {"byte 0 is NUL"});
}

// Returns the processor time of parsing in clock ticks.
double parsing_time(const std::string& text) {
  const std::clock_t begin = std::clock();
  parse(text);
  return static_cast<double>(std::clock() - begin);
}

TEST(JsonObject, ParsesInTimeProportionalToTheText) {
  const auto list_of = [](int count, std::string_view part) {
    std::string text = "{\"a\":[" + std::string(part);
    for (int i = 1; i < count; ++i) text.append(",").append(part);
    return text + "]}";
  };
  for (const std::string_view part : {"{}", "[]", "7", "{\"k\":{}}"}) {
    constexpr int kFew = 100'000, kTimes = 8;
    const double few = parsing_time(list_of(kFew, part));
    const double many = parsing_time(list_of(kTimes * kFew, part));
    // Quadratic time would be 64 times as long.
    EXPECT_LT(many, 3 * kTimes * few + CLOCKS_PER_SEC / 10.0) << part;
  }
}

// Memory runs out while a document is read, or while it is destroyed because of that.
TEST(JsonObject, SurvivesExhaustedMemory) {
  const std::string text =
      R"({"a":[{"b":[1,2,{"a long enough name for the heap":{"c":[[[]]]}}]}],"d":{"e":[{},{}]}})";
  int failures = 0;
  for (int64_t before = 0;; ++before) {
    test::failure_lasts = true;
    test::allocations_before_failure = before;
    bool failed = false;
    try {
      parse(text);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    test::allocations_before_failure = -1;
    test::failure_lasts = false;
    if (!failed) break;
    ++failures;
  }
  EXPECT_GT(failures, 20);
}

TEST(JsonObject, CutsLongTextsBetweenCharacters) {
  std::string name(199, 'n');
  name += "\u00e9\u00e9";
  expect_corrupt([&] { parse("{\"" + name + "\":1,\"" + name + "\":2}"); },
                 {"'" + name.substr(0, 199) + "'... (203 bytes)"});
}

TEST(JsonObject, ReadsTheModelsOfTheRepository) {
  const JsonObject config = JsonObject::open(FOVEA_SOURCE_DIR "/testdata/models/llama/config.json");
  EXPECT_EQ(config.texts("architectures"), std::vector<std::string>{"LlamaForCausalLM"});
  EXPECT_EQ(config.object("rope_parameters").number("rope_theta", 1, 1e9), 10000.0);
  EXPECT_THROW(JsonObject::open(FOVEA_SOURCE_DIR "/testdata/none.json"), Error);
}

}  // namespace
}  // namespace fovea
