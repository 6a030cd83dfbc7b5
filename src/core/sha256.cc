// SPDX-License-Identifier: Apache-2.0
#include "core/sha256.h"

#include <algorithm>
#include <bit>

namespace fovea {
namespace {

// The fractional bits of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t read_big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

template <typename Word>
void write_big_endian(Word word, uint8_t* bytes) {
  for (size_t i = 0; i < sizeof(Word); ++i) {
    bytes[i] = static_cast<uint8_t>(word >> 8 * (sizeof(Word) - 1 - i));
  }
}

// The message schedule: the 16 words of a block and 48 words that follow from them.
std::array<uint32_t, 64> schedule(const uint8_t* block) {
  std::array<uint32_t, 64> words;
  for (size_t i = 0; i < 16; ++i) words[i] = read_big_endian(block + 4 * i);
  for (size_t i = 16; i < words.size(); ++i) {
    const uint32_t older = words[i - 15], newer = words[i - 2];
    const uint32_t sigma0 = std::rotr(older, 7) ^ std::rotr(older, 18) ^ (older >> 3);
    const uint32_t sigma1 = std::rotr(newer, 17) ^ std::rotr(newer, 19) ^ (newer >> 10);
    words[i] = words[i - 16] + sigma0 + words[i - 7] + sigma1;
  }
  return words;
}

}  // namespace

Sha256::Sha256() { start(); }

void Sha256::start() {
  // The fractional bits of the square roots of the first 8 primes.
  state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  bytes_ = 0;
}

void Sha256::add_block(const uint8_t* block) {
  const std::array<uint32_t, 64> words = schedule(block);
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < words.size(); ++i) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t t1 = h + sum1 + choice + kRoundConstants[i] + words[i];
    const uint32_t t2 = sum0 + majority;
    h = g, g = f, f = e, e = d + t1;
    d = c, c = b, b = a, a = t1 + t2;
  }
  const std::array<uint32_t, 8> sums = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state_.size(); ++i) state_[i] += sums[i];
}

Sha256& Sha256::update(const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  const size_t pending = bytes_ % kBlockBytes;
  bytes_ += bytes;
  if (pending > 0) {
    const size_t taken = std::min(bytes, kBlockBytes - pending);
    std::copy_n(at, taken, pending_.begin() + static_cast<std::ptrdiff_t>(pending));
    at += taken, bytes -= taken;
    if (pending + taken < kBlockBytes) return *this;
    add_block(pending_.data());
  }
  for (; bytes >= kBlockBytes; bytes -= kBlockBytes, at += kBlockBytes) add_block(at);
  std::copy_n(at, bytes, pending_.begin());
  return *this;
}

// Pads the message: one set bit, zeros, and the message's length in bits as the last 8 bytes of a
// block.
Sha256::Digest Sha256::finish() {
  std::array<uint8_t, 2 * kBlockBytes> padding = {0x80};
  const size_t zeros = (2 * kBlockBytes - 9 - bytes_ % kBlockBytes) % kBlockBytes;
  write_big_endian(8 * bytes_, padding.data() + 1 + zeros);
  update(padding.data(), 1 + zeros + 8);
  Digest digest;
  for (size_t i = 0; i < state_.size(); ++i) write_big_endian(state_[i], digest.data() + 4 * i);
  start();
  return digest;
}

}  // namespace fovea
