// SPDX-License-Identifier: Apache-2.0
#include "support/paged_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>

#include "support/cache_format.h"

namespace fovea::test {
namespace {

constexpr int64_t kGapElements = 32;
constexpr int32_t kMlaFp8RowBytes = 656;

// Returns the elements of a (slot, head) row of K, and of V if it has its own memory.
int64_t k_row_elements(const KvCacheSpec& spec) {
  return spec.layout == KvLayout::mla_fp8_rows ? kMlaFp8RowBytes : spec.head_dim;
}

int32_t pages_for(int32_t tokens, int32_t page_size) {
  return (tokens + page_size - 1) / page_size;
}

}  // namespace

LentPool::LentPool(const KvCacheSpec& spec, int64_t pages, int64_t page_stride, Fill fill,
                   std::vector<int64_t> slot_map)
    : spec_(spec), pages_(pages), slot_map_(std::move(slot_map)) {
  const int64_t row = std::max<int64_t>(k_row_elements(spec), spec.head_dim_v);
  page_elements_ = spec.page_size * spec.kv_heads * row;
  page_stride_ = page_stride > 0 ? page_stride : page_elements_;
  block_bytes_ = static_cast<size_t>(pages * page_stride_) * dtype_bytes(spec.dtype);
  mapped_bytes_ = block_bytes_ * 2 * static_cast<size_t>(spec.layers);
  void* memory = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no address space for the pool");
  memory_ = static_cast<char*>(memory);

  const auto per_token = static_cast<size_t>(pages * spec.page_size * spec.kv_heads);
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    for (bool is_k : {true, false}) {
      std::vector<float> scales = is_k ? given_k_scales(spec) : given_v_scales(spec);
      if (spec.scale == KvScale::per_token_head) {
        scales.resize(per_token);
        std::memset(scales.data(), fill_byte(fill), per_token * sizeof(float));
        // Page 0 is finite.
        std::fill_n(scales.begin(), spec.page_size * spec.kv_heads, 1.0f);
      }
      (is_k ? k_scales_ : v_scales_).push_back(std::move(scales));
    }
  }
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    fill_pages(this->layer(layer), 1, pages, fill_byte(fill));
  }
}

LentPool::~LentPool() { munmap(memory_, mapped_bytes_); }

// Fills page by page, so that gaps of gigabytes stay untouched; fills small gaps, too.
void LentPool::fill_pages(const KvLayerView& view, int64_t first, int64_t last, int byte) const {
  if (byte == 0) return;  // fresh mappings are zero
  constexpr int64_t kSmallGap = 1 << 16;
  const int64_t gap = page_stride_ - page_elements_;
  const auto bytes = static_cast<size_t>(gap < kSmallGap ? page_stride_ : page_elements_) *
                     dtype_bytes(spec_.dtype);
  for (int64_t page = first; page < last; ++page) {
    std::memset(k_address(view, page * spec_.page_size, 0), byte, bytes);
    if (spec_.layout == KvLayout::mha) {
      std::memset(v_address(view, page * spec_.page_size, 0), byte, bytes);
    }
  }
}

KvLayerView LentPool::layer(int32_t index) const {
  KvLayerView view;
  view.layout = spec_.layout;
  view.scale = spec_.scale;
  view.dtype = spec_.dtype;
  view.page_size = spec_.page_size;
  view.slots = pages_ * spec_.page_size;
  const bool hnd = spec_.order == KvOrder::hnd;
  const auto strides = [&](int64_t row, int64_t& page, int64_t& token, int64_t& head) {
    page = page_stride_;
    token = hnd ? row : row * spec_.kv_heads;
    head = hnd ? row * spec_.page_size : row;
  };
  view.k = memory_ + block_bytes_ * 2 * static_cast<size_t>(index);
  strides(k_row_elements(spec_), view.k_page_stride, view.k_token_stride, view.k_head_stride);
  if (spec_.layout == KvLayout::mha) {
    view.v = view.k + block_bytes_;
    strides(spec_.head_dim_v, view.v_page_stride, view.v_token_stride, view.v_head_stride);
  } else {
    view.v = view.k;
    view.v_page_stride = view.k_page_stride;
    view.v_token_stride = view.k_token_stride;
    view.v_head_stride = view.k_head_stride;
  }
  if (spec_.scale != KvScale::none) {
    // The views have writable pointers to scales of a pool that is const here.
    view.k_scale = const_cast<float*>(k_scales_[static_cast<size_t>(index)].data());
    const auto& v_scales = spec_.layout == KvLayout::mha ? v_scales_ : k_scales_;
    view.v_scale = const_cast<float*>(v_scales[static_cast<size_t>(index)].data());
  }
  return view;
}

std::vector<std::span<std::byte>> LentPool::memory() {
  std::vector<std::span<std::byte>> blocks = {
      {reinterpret_cast<std::byte*>(memory_), mapped_bytes_}};
  for (auto* scales : {&k_scales_, &v_scales_}) {
    for (std::vector<float>& layer : *scales) {
      blocks.push_back(std::as_writable_bytes(std::span(layer)));
    }
  }
  blocks.push_back(std::as_writable_bytes(std::span(slot_map_)));
  return blocks;
}

bool LentPool::same_content(const LentPool& other) const {
  const auto same_floats = [](const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) return false;
    return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  for (size_t layer = 0; layer < k_scales_.size(); ++layer) {
    if (!same_floats(k_scales_[layer], other.k_scales_[layer])) return false;
    if (!same_floats(v_scales_[layer], other.v_scales_[layer])) return false;
  }
  return mapped_bytes_ == other.mapped_bytes_ &&
         std::memcmp(memory_, other.memory_, mapped_bytes_) == 0;
}

PagedStore::PagedStore(const AttentionCase& test, const CaseData& data, Fill fill,
                       Written written) {
  place_requests(test, data, fill);
  std::vector<int64_t> slot_map =
      test.window_pool ? make_slot_map(test, data) : std::vector<int64_t>();
  int64_t page_stride = test.page_stride;
  const KvCacheSpec spec = complete_cache(test);
  if (page_stride == 0 && test.strided) {
    const int64_t row = std::max<int64_t>(k_row_elements(spec), spec.head_dim_v);
    page_stride = spec.page_size * spec.kv_heads * row + kGapElements;
  }
  pool_ = std::make_unique<LentPool>(spec, pool_pages_, page_stride, fill, std::move(slot_map));
  for (size_t request = 0; request < data.requests.size(); ++request) {
    for (int32_t token = 0; token < data.requests[request].kv_len; ++token) {
      if (written == Written::all || is_written_before(test, data.requests[request], token)) {
        write(test, data, request, token);
      }
    }
  }
}

std::vector<std::span<std::byte>> PagedStore::tables() {
  return {std::as_writable_bytes(std::span(table_)),
          std::as_writable_bytes(std::span(page_table_))};
}

bool PagedStore::is_written_before(const AttentionCase& test, const RequestData& request,
                                   int32_t token) {
  if (test.prewritten || test.spec.scope == AttentionScope::cross) return true;
  const int32_t index = token - request.cached();
  return index < 0 || (test.skip_some_writes && index % 2 == 1);
}

void PagedStore::place_requests(const AttentionCase& test, const CaseData& data, Fill fill) {
  const int32_t page_size = test.cache.page_size;
  const auto shared = [&](int32_t prefix) { return prefix / page_size * page_size; };
  AttentionCase paged = test;  // only whole pages are shared
  paged.shared_prefix = shared(test.shared_prefix);
  paged.group_prefix = shared(test.group_prefix);
  int64_t needed = 0;
  int32_t longest = 0;
  for (const RequestData& request : data.requests) {
    needed += pages_for(request.kv_len, page_size);
    longest = std::max(longest, request.kv_len);
  }
  full_pages_ = 1 + needed + 3;  // page 0 and three unowned pages
  pool_pages_ = full_pages_;

  std::mt19937 random(test.seed + 1);
  std::vector<int64_t> pages(static_cast<size_t>(full_pages_ - 1));
  std::iota(pages.begin(), pages.end(), 1);
  std::shuffle(pages.begin(), pages.end(), random);
  auto next_page = pages.begin();

  table_rows_ = static_cast<int32_t>(data.requests.size()) + 2;
  table_stride_ = longest + 3;
  table_ = index_array(static_cast<size_t>(table_rows_ * table_stride_), fill);
  std::fill_n(table_.begin(), table_stride_, 0);  // row 0 is the dummy
  page_table_stride_ = pages_for(longest, page_size) + 3;
  page_table_ = index_array(static_cast<size_t>(table_rows_ * page_table_stride_), fill);
  std::fill_n(page_table_.begin(), page_table_stride_, 0);
  rows_.resize(static_cast<size_t>(table_rows_) - 1);
  std::iota(rows_.begin(), rows_.end(), 1);
  std::shuffle(rows_.begin(), rows_.end(), random);

  for (size_t index = 0; index < data.requests.size(); ++index) {
    std::vector<int64_t>& slots = slots_.emplace_back();
    if (index + static_cast<size_t>(test.padding) >= data.requests.size()) {
      rows_[index] = 0;
      slots.assign(static_cast<size_t>(data.requests[index].kv_len), 0);
      continue;
    }
    for (int32_t token = 0; token < data.requests[index].kv_len; ++token) {
      const int32_t offset = token % page_size;
      int64_t page = 0;
      const size_t owner = owner_of(paged, index, token);
      if (owner != index) {
        page = slots_[owner][token] / page_size;
      } else {
        page = offset == 0 ? *next_page++ : slots.back() / page_size;
      }
      slots.push_back(page * page_size + offset);
      table_[rows_[index] * table_stride_ + token] = static_cast<int32_t>(slots.back());
      page_table_[rows_[index] * page_table_stride_ + token / page_size] =
          static_cast<int32_t>(page);
    }
  }
}

std::vector<int64_t> PagedStore::make_slot_map(const AttentionCase& test, const CaseData& data) {
  const int32_t page_size = test.cache.page_size;
  std::vector<int64_t> map(static_cast<size_t>(full_pages_ * page_size), -1);
  std::iota(map.begin(), map.begin() + page_size, 0);
  std::vector<int64_t> window_page(static_cast<size_t>(full_pages_), 0);  // 0: none yet
  int64_t next = 2;                                                       // page 1 stays unowned
  for (size_t index = 0; index < data.requests.size(); ++index) {
    const RequestData& request = data.requests[index];
    for (int32_t token = 0; token < request.kv_len; ++token) {
      if (token <= request.cached() - test.spec.window) continue;
      const int64_t slot = slots_[index][token];
      int64_t& page = window_page[static_cast<size_t>(slot / page_size)];
      if (page == 0) page = next++;
      map[static_cast<size_t>(slot)] = page * page_size + slot % page_size;
    }
  }
  pool_pages_ = next + 1;
  return map;
}

void PagedStore::write(const AttentionCase& test, const CaseData& data, size_t request,
                       int32_t token) {
  int64_t slot = slots_[request][token];
  if (!pool_->slot_map().empty()) slot = pool_->slot_map()[static_cast<size_t>(slot)];
  if (slot < 0) return;
  const KvLayerView view = pool_->layer(kLayer);
  const StoredToken stored = store_token(test.spec, pool_->spec(), data.requests[request], token);
  const bool has_scale = view.scale == KvScale::per_token_head;
  for (size_t head = 0; head < stored.k.size(); ++head) {
    const auto at = static_cast<int64_t>(head);
    const int64_t scale_at = slot * test.spec.kv_heads + at;
    const std::vector<char>& k = stored.k[head].bytes;
    std::memcpy(k_address(view, slot, at), k.data(), k.size());
    if (has_scale) view.k_scale[scale_at] = stored.k[head].scale;
    if (stored.v.empty()) continue;
    const std::vector<char>& v = stored.v[head].bytes;
    std::memcpy(v_address(view, slot, at), v.data(), v.size());
    if (has_scale) view.v_scale[scale_at] = stored.v[head].scale;
  }
}

}  // namespace fovea::test
