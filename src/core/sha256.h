// SPDX-License-Identifier: Apache-2.0
// SHA-256 through OpenSSL's EVP interface. One object can compute any number of digests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

extern "C" {
struct evp_md_ctx_st;
struct evp_md_st;
}

namespace fovea {

class Sha256 {
 public:
  using Digest = std::array<uint8_t, 32>;

  Sha256();  // throws Error{unsupported} if the installed OpenSSL lacks SHA-256

  Sha256& update(const void* data, size_t bytes);
  Digest finish();  // digest of everything since construction or the last finish()

 private:
  std::unique_ptr<evp_md_st, void (*)(evp_md_st*)> algorithm_;
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

}  // namespace fovea
