// SPDX-License-Identifier: Apache-2.0
// Moves cached tokens between pools whose pages differ. An engine for prompts and one for decodes
// may have pages of other sizes or orders: the receiver lands pages as they are (pool_regions.h) in
// a pool of the sender's kind, and copies the request from there to its own pool.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "fovea/api.h"
#include "fovea/device.h"
#include "fovea/kv_cache.h"

namespace FOVEA_API fovea {

// Bound to two pools on one device. Calls on one object must not overlap.
class PageConverter {
 public:
  virtual ~PageConverter() = default;
  // Copies keys and values of tokens [0, tokens) of a request in all layers, with their scales.
  // from_pages and to_pages are the pages of the request, in order, in host memory; they are read
  // before the call returns. On a GPU the copies are enqueued, also in a capture, and the pools'
  // device is current afterwards. Throws Error{invalid_argument} naming a page that the pool does
  // not have, or a list that is too short.
  virtual void convert(std::span<const int64_t> from_pages, std::span<const int64_t> to_pages,
                       int64_t tokens, Stream stream = nullptr) = 0;
};

// The pools may differ in page size, order, strides and number of pages, and must outlive the
// converter. Throws Error{invalid_argument} naming what else differs, and Error{unsupported} for
// windows and for scales that the caller sets once for all pages, which a page does not hold.
std::unique_ptr<PageConverter> make_page_converter(const KvPool& from, const KvPool& to);

}  // namespace fovea
