// SPDX-License-Identifier: Apache-2.0
#include "core/sha256.h"

#include <openssl/evp.h>

#include "core/check.h"

namespace fovea {
namespace {

void require(bool succeeded) {
  if (!succeeded) fail(ErrorCode::unsupported, "OpenSSL refused to compute SHA-256");
}

}  // namespace

Sha256::Sha256()
    : algorithm_(EVP_MD_fetch(nullptr, "SHA256", nullptr), EVP_MD_free),
      context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  require(algorithm_ && context_);
  require(EVP_DigestInit_ex2(context_.get(), algorithm_.get(), nullptr) == 1);
}

Sha256& Sha256::update(const void* data, size_t bytes) {
  require(EVP_DigestUpdate(context_.get(), data, bytes) == 1);
  return *this;
}

Sha256::Digest Sha256::finish() {
  Digest digest;
  require(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1);
  require(EVP_DigestInit_ex2(context_.get(), nullptr, nullptr) == 1);
  return digest;
}

}  // namespace fovea
