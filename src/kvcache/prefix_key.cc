// SPDX-License-Identifier: Apache-2.0
#include "kvcache/prefix_key.h"

#include <bit>

namespace fovea {
namespace {

// Keys may be compared between machines one day, so they are little endian everywhere.
static_assert(std::endian::native == std::endian::little);

// Each hash input begins with a tag of its kind, so that a root never equals a page.
constexpr std::string_view kRootTag = "fovea prefix root 1";
constexpr std::string_view kPageTag = "fovea prefix page 1";

void append_field(std::string& out, char tag, std::string_view value) {
  const uint64_t length = value.size();
  out.push_back(tag);
  out.append(reinterpret_cast<const char*>(&length), sizeof(length));
  out.append(value);
}

}  // namespace

std::string serialise(const PrefixDomain& domain) {
  std::string out;
  append_field(out, 'm', domain.model);
  append_field(out, 'a', domain.adapter);
  append_field(out, 'f', domain.kv_format);
  append_field(out, 's', domain.salt);
  return out;
}

PrefixKey hash_domain(Sha256& hash, const std::string& serialised) {
  return hash.update(kRootTag.data(), kRootTag.size())
      .update(serialised.data(), serialised.size())
      .finish();
}

PrefixKey hash_page(Sha256& hash, const PrefixKey& parent, std::span<const int32_t> tokens) {
  const uint64_t count = tokens.size();
  return hash.update(kPageTag.data(), kPageTag.size())
      .update(parent.data(), parent.size())
      .update(&count, sizeof(count))
      .update(tokens.data(), tokens.size_bytes())
      .finish();
}

PrefixKey prefix_root_key(const PrefixDomain& domain) {
  Sha256 hash;
  return hash_domain(hash, serialise(domain));
}

PrefixKey prefix_page_key(const PrefixKey& parent, std::span<const int32_t> page_tokens) {
  Sha256 hash;
  return hash_page(hash, parent, page_tokens);
}

}  // namespace fovea
