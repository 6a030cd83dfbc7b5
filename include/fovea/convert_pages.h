// SPDX-License-Identifier: Apache-2.0
// Moves cached tokens between pools whose pages differ. An engine for prompts and one for decodes
// may have pages of other sizes, orders or dtypes: the receiver lands pages as they are
// (pool_regions.h) in a pool of the sender's kind, and moves the request from there to its own
// pool.
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
  // Moves keys and values of tokens [0, tokens) of a request in all layers, with their scales.
  // from_pages and to_pages are the pages of the request, in order, in host memory; they are read
  // before the call returns. On a GPU the copies are enqueued, also in a capture, and the pools'
  // device is current afterwards. Throws Error{invalid_argument} naming a page that the pool does
  // not have, or a list that is too short.
  virtual void convert(std::span<const int64_t> from_pages, std::span<const int64_t> to_pages,
                       int64_t tokens, Stream stream = nullptr) = 0;
};

// The pools may differ in page size, order, strides, number of pages, dtype and scale, and must
// outlive the converter. Rows of one dtype and scale keep their bits. Others are read as f32 and
// stored as a backend stores new ones: rounded to nearest even, in fp8 saturated, with the scale of
// KvScale::per_token_head computed again.
//
// Throws Error{invalid_argument} naming what else differs, and Error{unsupported} for windows, for
// scales that the caller sets once for all pages, which a page does not hold, and on a GPU for rows
// of KvLayout::mla_fp8_rows in one pool only.
std::unique_ptr<PageConverter> make_page_converter(const KvPool& from, const KvPool& to);

}  // namespace fovea
