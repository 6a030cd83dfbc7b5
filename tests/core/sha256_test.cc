// SPDX-License-Identifier: Apache-2.0
#include "core/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace fovea {
namespace {

// The examples of FIPS 180-2, appendix B.1, and the empty message.
TEST(Sha256, KnownDigests) {
  const auto hex = [](const Sha256::Digest& digest) {
    std::string text;
    for (const uint8_t byte : digest) {
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
    return text;
  };
  Sha256 hash;
  EXPECT_EQ(hex(hash.finish()), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(hash.update("a", 1).update("bc", 2).finish()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(hash.update("abc", 3).finish()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace fovea
