// SPDX-License-Identifier: Apache-2.0
#include "attention/row_pieces.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/mla_row.h"

namespace fovea {
namespace {

using kernels::RowPiece;

// `count` equal pieces of a row, `stride` bytes apart.
struct Pieces {
  RowPiece first;
  int32_t count = 1;
  int64_t stride = 0;
};

class PieceList {
 public:
  PieceList(size_t pool, bool on_gpu, int32_t max_bytes)
      : pool_(pool), on_gpu_(on_gpu), max_bytes_(max_bytes) {}

  // Adds pieces, joined if they follow each other, and cut to the maximum.
  void add(Pieces pieces) {
    if (pieces.stride == pieces.first.bytes) {
      pieces.first.bytes *= pieces.count;
      pieces.count = 1;
    }
    for (int32_t i = 0; i < pieces.count; ++i) {
      RowPiece rest = pieces.first;
      rest.base += i * pieces.stride;
      while (rest.bytes > 0) {
        RowPiece piece = rest;
        piece.bytes = std::min(rest.bytes, max_bytes_);
        piece.unit = unit_of(piece);
        list_.push_back(piece);
        rest.base += piece.bytes;
        rest.bytes -= piece.bytes;
      }
    }
  }
  std::vector<RowPiece> take() { return std::move(list_); }

 private:
  int32_t unit_of(const RowPiece& piece) const {
    const int64_t bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(piece.base)) |
                         piece.page_stride | piece.token_stride | piece.bytes;
    if (bits % 16 == 0) return 16;
    if (bits % 4 != 0 && on_gpu_) {
      fail(ErrorCode::unsupported,
           "pools[{}]: a row of {} bytes, {} apart, is not of whole words of 4 bytes", pool_,
           piece.bytes, piece.token_stride);
    }
    return 4;
  }

  size_t pool_;
  bool on_gpu_;
  int32_t max_bytes_;
  std::vector<RowPiece> list_;
};

void add_layer(const KvPool& pool, const KvLayerView& view, PieceList& list) {
  const KvCacheSpec& spec = pool.spec();
  const auto bytes = static_cast<int64_t>(dtype_bytes(view.dtype));
  RowPiece piece{};
  piece.slot_map = pool.device_slot_map();
  piece.slots =
      piece.slot_map != nullptr ? static_cast<int64_t>(pool.slot_map().size()) : view.slots;
  piece.page_size = view.page_size;
  const auto add_rows = [&](char* base, int64_t page, int64_t token, int64_t head, int32_t dim) {
    piece.base = base;
    piece.page_stride = page * bytes;
    piece.token_stride = token * bytes;
    piece.bytes = static_cast<int32_t>(dim * bytes);
    list.add({piece, spec.kv_heads, head * bytes});
  };
  const bool mla = view.layout != KvLayout::mha;
  const int32_t dim = view.layout == KvLayout::mla_fp8_rows ? kernels::kMlaRowBytes : spec.head_dim;
  add_rows(view.k, view.k_page_stride, view.k_token_stride, view.k_head_stride, dim);
  if (!mla) {
    add_rows(view.v, view.v_page_stride, view.v_token_stride, view.v_head_stride, spec.head_dim_v);
  }
  if (view.scale != KvScale::per_token_head) return;
  piece.token_stride = spec.kv_heads * int64_t{sizeof(float)};
  piece.page_stride = piece.token_stride * view.page_size;
  piece.bytes = static_cast<int32_t>(piece.token_stride);
  for (float* const scales : {view.k_scale, mla ? nullptr : view.v_scale}) {
    if (scales == nullptr) continue;
    piece.base = reinterpret_cast<char*>(scales);
    list.add({.first = piece});
  }
}

}  // namespace

std::vector<RowPiece> row_pieces(std::span<KvPool* const> pools, int32_t max_bytes) {
  std::vector<RowPiece> all;
  for (size_t i = 0; i < pools.size(); ++i) {
    const KvPool& pool = *pools[i];
    PieceList list(i, pool.device().kind == DeviceKind::cuda, max_bytes);
    for (int32_t layer = 0; layer < pool.spec().layers; ++layer) {
      add_layer(pool, pool.layer(layer), list);
    }
    const std::vector<RowPiece> pieces = list.take();
    all.insert(all.end(), pieces.begin(), pieces.end());
  }
  return all;
}

}  // namespace fovea
