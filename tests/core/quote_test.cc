// SPDX-License-Identifier: Apache-2.0
#include "core/quote.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace fovea {
namespace {

TEST(Quote, EscapesWhatATerminalActsOn) {
  struct Case {
    std::string_view text, shown;
  };
  using namespace std::string_view_literals;
  const Case cases[] = {
      {"", "''"},
      {"a tensor", "'a tensor'"},
      {"naïve 日本語 🙂", "'naïve 日本語 🙂'"},
      {"it's a \\", R"('it\'s a \\')"},
      {"\033[31mred\007", R"('\x1b[31mred\x07')"},
      {"a\0b\n\x7f"sv, R"('a\x00b\x0a\x7f')"},
      {"\u0085\u009b31m", R"('\u0085\u009b31m')"},              // two-byte controls
      {"a\u202eb\u2066c\ufeff", R"('a\u202eb\u2066c\ufeff')"},  // characters that reorder text
      {"\u2028\u200f", R"('\u2028\u200f')"},
      {"\xff\xc3", R"('\xff\xc3')"},
      {"\xc0\x80 \xed\xa0\x80 \xf4\x90\x80\x80"sv, R"('\xc0\x80 \xed\xa0\x80 \xf4\x90\x80\x80')"},
      {"\xe2\x82", R"('\xe2\x82')"},  // truncated
  };
  for (const auto& [text, shown] : cases) EXPECT_EQ(quote(text), shown);
}

TEST(Quote, CutsLongTexts) {
  const std::string long_text(5'000'000, 'n');
  EXPECT_EQ(quote(long_text), "'" + std::string(200, 'n') + "'... (5000000 bytes)");
  EXPECT_EQ(clipped(long_text), std::string(200, 'n') + "... (5000000 bytes)");
  EXPECT_EQ(printable(long_text), long_text);
  const std::string exact(200, 'n');
  EXPECT_EQ(quote(exact), "'" + exact + "'");
  // Between characters.
  EXPECT_EQ(clipped(std::string(199, 'n') + "éé"), std::string(199, 'n') + "... (203 bytes)");
  EXPECT_EQ(clipped(std::string(198, 'n') + "éé"), std::string(198, 'n') + "é... (202 bytes)");
  // The limit counts bytes of the text; its escapes are longer.
  EXPECT_EQ(clipped(std::string(1000, '\033')).size(),
            4 * 200 + std::string("... (1000 bytes)").size());
}

TEST(Quote, LeavesTextsWithoutQuotesAlone) {
  EXPECT_EQ(clipped(R"(it's \ fine)"), R"(it's \ fine)");
  EXPECT_EQ(printable("/tmp/\033[2Jmodel"), R"(/tmp/\x1b[2Jmodel)");
}

}  // namespace
}  // namespace fovea
