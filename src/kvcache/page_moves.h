// SPDX-License-Identifier: Apache-2.0
// The two ways in which a PageConverter moves rows of a request: it copies their bytes, or converts
// their values.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "fovea/kv_cache.h"
#include "kernels/cuda/portable/page_copy/launch.h"

namespace fovea {

// The first tokens of a request, and its pages in both pools.
struct MovedRequest {
  std::span<const int64_t> from_pages, to_pages;
  int64_t tokens = 0;
};

// Bound to two pools that have been checked.
class PageMoves {
 public:
  virtual ~PageMoves() = default;
  // Moves the request in all layers of pools of the CPU.
  virtual void run(const MovedRequest& request) const = 0;
  // Enqueues the same for some tokens of a request of a GPU.
  virtual void enqueue(const kernels::cuda::MovedTokens& moved,
                       const kernels::cuda::PageCopy& kernels, Stream stream) const = 0;
};

// Rows have the same bytes in both pools. Throws Error{unsupported} for rows that a GPU cannot
// copy.
std::unique_ptr<PageMoves> make_row_copies(const KvPool& from, const KvPool& to);
// Rows have other dtypes or scales. Values are stored as kernels/kv_write.h describes.
std::unique_ptr<PageMoves> make_row_conversions(const KvPool& from, const KvPool& to);

}  // namespace fovea
