// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4). One object can compute any number of digests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fovea {

class Sha256 {
 public:
  using Digest = std::array<uint8_t, 32>;

  Sha256();

  // Appends bytes to the message.
  Sha256& update(const void* data, size_t bytes);
  // Returns the digest of everything since construction or the last finish(), and starts anew.
  Digest finish();

 private:
  static constexpr size_t kBlockBytes = 64;

  void start();
  void add_block(const uint8_t* block);

  std::array<uint32_t, 8> state_;
  std::array<uint8_t, kBlockBytes> pending_;  // the start of a block that is not full yet
  uint64_t bytes_;                            // length of the message so far
};

}  // namespace fovea
