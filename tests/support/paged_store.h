// SPDX-License-Identifier: Apache-2.0
// The tokens of a case in pages: a pool lent by the test, pages in random order, a request table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fovea/kv_cache.h"
#include "support/attention_case.h"
#include "support/poison.h"

namespace fovea::test {

// Pages of reserved address space, which take memory only if touched.
class LentPool : public KvPool {
 public:
  // page_stride in elements, 0: dense. slot_map may be empty.
  LentPool(const KvCacheSpec& spec, int64_t pages, int64_t page_stride, Fill fill,
           std::vector<int64_t> slot_map);
  ~LentPool() override;
  LentPool(const LentPool&) = delete;
  LentPool& operator=(const LentPool&) = delete;

  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return pages_; }
  KvLayerView layer(int32_t index) const override;
  std::span<const int64_t> slot_map() const override { return slot_map_; }

  // Returns all bytes of the pool, including scales and slot map.
  std::vector<std::span<std::byte>> memory();
  // Compares all bytes of all layers, including scales.
  bool same_content(const LentPool& other) const;

 private:
  void fill_pages(const KvLayerView& view, int64_t first, int64_t last, int byte) const;

  KvCacheSpec spec_;
  int64_t pages_;
  int64_t page_stride_ = 0;
  int64_t page_elements_ = 0;  // K of one page and layer, without the following gap
  size_t block_bytes_ = 0;     // K of one layer
  size_t mapped_bytes_ = 0;
  char* memory_ = nullptr;
  std::vector<std::vector<float>> k_scales_, v_scales_;  // [layers]
  std::vector<int64_t> slot_map_;
};

// Puts the tokens into the cache that it has before the batch runs.
enum class Written : uint8_t { before, all };

class PagedStore {
 public:
  static constexpr int32_t kLayer = 1;  // the layer of the case; layer 0 keeps its fill

  PagedStore(const AttentionCase& test, const CaseData& data, Fill fill,
             Written written = Written::before);

  LentPool& pool() { return *pool_; }
  const LentPool& pool() const { return *pool_; }
  const int32_t* table() const { return table_.data(); }
  int32_t table_rows() const { return table_rows_; }
  int64_t table_stride() const { return table_stride_; }
  // Return the same table by pages.
  const int32_t* page_table() const { return page_table_.data(); }
  int64_t page_table_stride() const { return page_table_stride_; }
  std::vector<std::span<std::byte>> tables();
  int32_t row(size_t request) const { return rows_[request]; }
  int64_t slot(size_t request, int32_t token) const { return slots_[request][token]; }

  // Returns false if forward() must store the token.
  static bool is_written_before(const AttentionCase& test, const RequestData& request,
                                int32_t token);

 private:
  void place_requests(const AttentionCase& test, const CaseData& data, Fill fill);
  std::vector<int64_t> make_slot_map(const AttentionCase& test, const CaseData& data);
  void write(const AttentionCase& test, const CaseData& data, size_t request, int32_t token);

  std::vector<std::vector<int64_t>> slots_;  // [request][token]
  std::vector<int32_t> rows_;
  int32_t table_rows_ = 0;
  std::vector<int32_t> table_;
  int64_t table_stride_ = 0;
  std::vector<int32_t> page_table_;
  int64_t page_table_stride_ = 0;
  int64_t full_pages_ = 0;
  int64_t pool_pages_ = 0;
  std::unique_ptr<LentPool> pool_;
};

}  // namespace fovea::test
