// SPDX-License-Identifier: Apache-2.0
#include "fovea/pass_addresses.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "fovea/error.h"

namespace fovea {
namespace {

// Returns the error of check(); empty: nothing has moved.
std::string moved(const PassAddresses& captured, const PassAddresses& now) {
  try {
    captured.check(now);
    return {};
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
}

template <typename T>
PassAddresses addresses(const T& of) {
  PassAddresses found;
  found.add(of);
  return found;
}

// Returns the number of words of a struct whose change check() does not notice. Each word in turn
// is set to another address.
template <typename T>
size_t words_not_compared(const T& empty) {
  const PassAddresses captured = addresses(empty);
  EXPECT_EQ(moved(captured, captured), "");
  char place = 0;
  const char* const elsewhere = &place;
  size_t unnoticed = 0;
  for (size_t offset = 0; offset + sizeof(void*) <= sizeof(T); offset += sizeof(void*)) {
    T changed = empty;
    std::memcpy(reinterpret_cast<char*>(&changed) + offset, &elsewhere, sizeof(elsewhere));
    const std::string error = moved(captured, addresses(changed));
    if (error.empty()) {
      ++unnoticed;
    } else {
      EXPECT_NE(error.find("the pass was captured with it at 0x0"), std::string::npos) << error;
    }
  }
  return unnoticed;
}

// The unnoticed words are values, sizes of spans and the two arrays of the host. A new array that
// add() misses adds one more word.
TEST(PassAddresses, HaveEveryArrayOfABatchAndOfALayer) {
  EXPECT_EQ(words_not_compared(BatchView{}), 30u);
  EXPECT_EQ(words_not_compared(LayerTensors{}), 39u);
}

TEST(PassAddresses, NameTheCacheThatMoved) {
  KvCacheSpec spec{.layers = 2, .kv_heads = 1, .head_dim = 8, .head_dim_v = 8, .page_size = 4};
  const auto pool = make_kv_pool(spec, 3), other = make_kv_pool(spec, 3);
  PassAddresses captured, now;
  captured.add(*pool, " of the draft model");
  now.add(*other, " of the draft model");
  EXPECT_EQ(moved(captured, now).rfind("k of layer 0 of the draft model is at 0x", 0), 0u);
}

TEST(PassAddresses, NameTheArrayThatIsNew) {
  const int32_t tokens[] = {1, 2};
  PassAddresses captured, now;
  captured.add("tokens", tokens);
  now.add("tokens", tokens);
  now.add("positions", tokens + 1);
  EXPECT_EQ(moved(captured, now).rfind("positions is at 0x", 0), 0u);
  EXPECT_NE(moved(captured, now).find("the pass was captured with it at 0x0"), std::string::npos);
}

TEST(PassAddresses, NameTheArrayThatIsGone) {
  const int32_t tokens[] = {1, 2};
  PassAddresses captured;
  captured.add("tokens", tokens);
  EXPECT_EQ(moved(captured, {}).rfind("tokens is at 0x0, the pass was captured", 0), 0u);
  PassAddresses renamed;
  renamed.add("positions", tokens);
  EXPECT_NE(moved(captured, renamed), "");
}

}  // namespace
}  // namespace fovea
