// SPDX-License-Identifier: Apache-2.0
// The language of chat templates: small templates compared with jinja2 (testdata/chat/snippets.json
// by tools/make_chat_goldens.py), the lines of errors, limits.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "support/expect_error.h"
#include "tokenizer/chat_template/read_json.h"
#include "tokenizer/chat_template/template.h"

namespace fovea::jinja {
namespace {

std::optional<std::string> render(const std::string& source, const Dict& variables,
                                  std::string& error) {
  try {
    return Template::parse(source, "test").render(variables);
  } catch (const Error& caught) {
    error = caught.what();
    return std::nullopt;
  }
}

TEST(Jinja, SnippetsGiveWhatTheReferenceGives) {
  std::ifstream file(FOVEA_SOURCE_DIR "/testdata/chat/snippets.json");
  const auto given = nlohmann::ordered_json::parse(file);
  const Dict variables = *read_json(given["variables"].dump(), "variables").dict();
  for (const auto& snippet : given["snippets"]) {
    const std::string source = snippet[0];
    SCOPED_TRACE(source);
    std::string error;
    const std::optional<std::string> got = render(source, variables, error);
    EXPECT_EQ(got.has_value(), !snippet[1].is_null()) << error;
    if (got && !snippet[1].is_null()) {
      EXPECT_EQ(*got, snippet[1].get<std::string>());
    }
    if (!got) {
      EXPECT_TRUE(error.starts_with("test, line 1: ")) << error;
    }
  }
  EXPECT_GT(given["snippets"].size(), 100u);
}

TEST(Jinja, ErrorsNameTheLine) {
  struct Case {
    std::string source, says;
    ErrorCode code = ErrorCode::unsupported;
  };
  for (const Case& wrong : std::vector<Case>{
           {"a\n{{ x | nothing }}", "test, line 2: there is no filter 'nothing'"},
           {"{% if x %}\n\n{% endfor %}", "line 3: unexpected 'endfor'"},
           {"{# a\n\n", "a comment has no end"},
           {"{% for x in y %}\n{{ x }}", "'endfor' is missing"},
           {"\n\n{% include 'x' %}", "line 3: unexpected 'include'"},
           {"{{ f(*x) }}", "arguments with * are not supported"},
           {"{% for x in y recursive %}{% endfor %}", "recursive loops"},
           {"{% break %}", "not in a loop"},
           {"{{ '\\ud800' }}", "no character"},
           {"\xFF", "not UTF-8"},
           {"a\n\n{{ x.y.z }}", "line 3: 'x' is undefined", ErrorCode::invalid_argument},
           {"a\n{% if true %}\n{{ raise_exception('Stop') }}{% endif %}", "line 3: Stop",
            ErrorCode::invalid_argument},
           {"{{ 9223372036854775807 + 1 }}", "beyond 64 bits", ErrorCode::invalid_argument}}) {
    SCOPED_TRACE(wrong.source);
    test::expect_error(wrong.code, {"test, line ", wrong.says},
                       [&] { (void)Template::parse(wrong.source, "test").render({}); });
  }
}

TEST(Jinja, LimitsEndTemplates) {
  struct Case {
    std::string source, says;
  };
  const auto many = [](int count, const std::string& text) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  const std::string loop = "{% for a in range(99999) %}{% for b in range(99999) %}";
  const std::string ends = "{% endfor %}{% endfor %}";
  for (const Case& wrong : std::vector<Case>{
           {loop + ends, "more than 1000000 steps"},
           {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls are nested deeper"},
           {"{{ 'x' * 10000000000 }}", "bytes of text"},
           {"{{ 'x' * 9223372036854775807 }}", "bytes of text"},
           {"{% set x = 'x' * 40000 %}{{ x.replace('', x) }}", "bytes of text"},
           {"{% set x = 'x' * 40000 %}{{ x.join(x | list) }}", "bytes of text"},
           {"{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
            "{% endfor %}",
            "bytes of text"},
           {"{{ 'x' * 70000000 }}", "the output is longer than 64000000"},
           {"{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}"
            "{% endfor %}",
            "a namespace cannot hold a list"},
           {"{% set a = namespace() %}{% set a.b = a %}", "a namespace cannot hold a namespace"},
           {"{% macro f() %}{% endmacro %}{% set a = namespace(f=[f]) %}", "cannot hold a list"},
           {"{{ [1] | tojson(indent=100000) }}", "the indent 100000 is above 1000"},
           {"{{ 'x' | indent(1000000) }}", "the width 1000000 is above 1000"},
           {"{{ range(9223372036854775807) }}", "more than 100000 numbers"},
           {"{{ " + many(101, "(") + "1" + many(101, ")") + " }}", "nested deeper than 100"},
           {"{{ " + many(200, "-") + "1 }}", "nested deeper than 100"},
           {"{{ " + many(200, "not ") + "1 }}", "nested deeper than 100"},
           {"{{ 1" + many(200, " + 1") + " }}", "nested deeper than 100"},
           {"{{ x" + many(200, ".x") + " }}", "nested deeper than 100"},
           {"{{ x" + many(200, " | trim") + " }}", "nested deeper than 100"},
           {many(200, "{% if 1 %}"), "nested deeper than 100"},
           {std::string(1'000'001, ' '), "the limit is 1000000"}}) {
    SCOPED_TRACE(wrong.source.substr(0, 100));
    std::string error;
    EXPECT_FALSE(render(wrong.source, {}, error).has_value());
    EXPECT_NE(error.find(wrong.says), error.npos) << error;
  }
}

TEST(Jinja, LongConversationsStayWithinTheLimits) {
  List messages;
  for (int i = 0; i < 5000; ++i) {
    Dict message;
    message.set("role", i % 2 == 0 ? "user" : "assistant");
    message.set("content", std::string(2000, 'x'));
    messages.emplace_back(message);
  }
  Dict variables;
  variables.set("messages", messages);
  const auto chat = Template::parse(
      "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '\\n' }}"
      "{% endfor %}",
      "test");
  EXPECT_GT(chat.render(variables).size(), 10'000'000u);
}

}  // namespace
}  // namespace fovea::jinja
