// SPDX-License-Identifier: Apache-2.0
#include "gpu/source_tokens.h"

#include <gtest/gtest.h>

#include "gpu/kernel_pack.h"
#include "kernels/cuda/sources.h"

namespace fovea::gpu {
namespace {

TEST(SourceTokens, LayoutAndCommentsDoNotCount) {
  const std::string plain = source_tokens("int f(int a) { return a + 1; }");
  for (const char* same :
       {"int f(int a) {\n  return a + 1;  // one more\n}\n", "int f( int a ){return a+1;}",
        "/* why */ int f(int a) { return /* a */ a + 1; }", "int f(int a) { return \\\n a + 1; }",
        "// int g() { \\\n still a comment\nint f(int a) { return a + 1; }"}) {
    EXPECT_EQ(source_tokens(same), plain) << same;
  }
}

TEST(SourceTokens, EverythingElseCounts) {
  struct Pair {
    const char *one, *other;
  };
  for (const Pair& pair :
       {Pair{"a + +b", "a ++b"}, Pair{"a - -b", "a-- b"}, Pair{"x < y", "x << y"},
        Pair{"ab", "a b"}, Pair{"1 2", "12"}, Pair{"0x1e+1", "0x1e + 2"},
        Pair{"1.5e+3f", "1.5e+2f"}, Pair{"\"a b\"", "\"a  b\""}, Pair{"\"//\" x", "\"//\" y"},
        Pair{"'\"' a", "'\"' b"}, Pair{"\"\\\"\" a", "\"\\\"\" b"},
        Pair{"R\"x(// )\" \n)x\" a", "R\"x(// )\" \n)x\" b"}, Pair{"#define F (x)", "#define F(x)"},
        Pair{"#define F x\ny", "#define F x y"}, Pair{"a /* x */ b", "a /* x */ c"},
        Pair{"1'000", "1'001"}, Pair{"a >> b", "a > > b"}}) {
    EXPECT_NE(source_tokens(pair.one), source_tokens(pair.other)) << pair.one;
  }
}

TEST(SourceTokens, DirectivesKeepTheirLine) {
  EXPECT_EQ(source_tokens("  #  define F(a)   a + \\\n   1  // why\nint b;"),
            source_tokens("#  define F(a) a + 1\nint\nb;"));
  EXPECT_EQ(source_tokens("#include \"a//b.h\"\n"), "#include \"a//b.h\"\n");
}

// A changed comment or line break in a header does not make packs and caches stale.
TEST(SourceTokens, DecideTheHashOfHeaders) {
  const Headers before(Headers::Texts{{"a.cuh", "int f();  // once\n#define X 1\n"}});
  const Headers formatted(Headers::Texts{{"a.cuh", "// A header.\nint\nf();\n#define X 1\n"}});
  const Headers changed(Headers::Texts{{"a.cuh", "int f();\n#define X 2\n"}});
  EXPECT_EQ(before.hash(), formatted.hash());
  EXPECT_NE(before.hash(), changed.hash());
}

TEST(SourceTokens, OfDeviceSourcesAreTheirOwnTokens) {
  for (const kernels::cuda::SourceFile& file : kernels::cuda::source_files()) {
    if (file.name.ends_with(".txt")) continue;
    const std::string tokens = source_tokens(file.text);
    EXPECT_EQ(source_tokens(tokens), tokens) << file.name;
    EXPECT_LT(tokens.size(), file.text.size()) << file.name;
  }
}

}  // namespace
}  // namespace fovea::gpu
