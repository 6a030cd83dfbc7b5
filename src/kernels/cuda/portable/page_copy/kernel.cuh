// SPDX-License-Identifier: Apache-2.0
// Moves the cached tokens of a request between pools with other pages. A warp takes one row of a
// head at a time: `rows` copies its bytes, `values` converts what it holds.
#pragma once

#include "kernels/cuda/common/fp8_codes.cuh"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/page_copy_params.h"

namespace fovea::kernels::cuda {

enum PageCopyOp { rows, values };

constexpr int kMoveWarps = 8;
constexpr KernelTraits kMoveTraits = {kMoveWarps * 32, 0, kMoveWarps, 0};

// A row of a head in both pools.
struct MovedRow {
  const char* from;
  char* to;
  int64_t from_slot, to_slot;
  int head;
};

// Calls body(row) for every row of the warp.
template <class Body>
__device__ void for_rows(const MovedTokens& moved, const CopiedRows& array, const Body& body) {
  const int count = moved.tokens * moved.heads;
  const auto page_of = [&](const int32_t* pages, int page_size, int64_t token) {
    return static_cast<int64_t>(pages[token / page_size - moved.first / page_size]);
  };
  for (int i = blockIdx.x * kMoveWarps + threadIdx.x / 32; i < count; i += gridDim.x * kMoveWarps) {
    const int64_t token = moved.first + i / moved.heads;
    const int head = i % moved.heads;
    const int64_t from_page = page_of(moved.from_pages, moved.from_page_size, token);
    const int64_t to_page = page_of(moved.to_pages, moved.to_page_size, token);
    const int64_t from_place = token % moved.from_page_size;
    const int64_t to_place = token % moved.to_page_size;
    body(MovedRow{
        array.from + from_page * array.from_page + from_place * array.from_token +
            head * array.from_head,
        array.to + to_page * array.to_page + to_place * array.to_token + head * array.to_head,
        from_page * moved.from_page_size + from_place, to_page * moved.to_page_size + to_place,
        head});
  }
}

struct CopyConfig {
  using Params = PageCopyParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kMoveTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const CopiedRows& array = params.arrays[blockIdx.y];
    for_rows(params.moved, array, [&](const MovedRow& row) {
      if (array.unit == 16) {
        copy<uint4>(row.from, row.to, array.row_bytes);
      } else {
        copy<uint32_t>(row.from, row.to, array.row_bytes);
      }
    });
  }

 private:
  template <class Unit>
  __device__ static void copy(const char* from, char* to, int bytes) {
    const int units = bytes / static_cast<int>(sizeof(Unit));
    for (int i = threadIdx.x % 32; i < units; i += 32) {
      reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    }
  }
};

struct ConvertConfig {
  using Params = PageConvertParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = kMoveTraits;

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const ConvertedRows& array = params.arrays[blockIdx.y];
    const int heads = params.moved.heads;
    for_rows(params.moved, array.at, [&](const MovedRow& row) {
      const float factor =
          array.from_scales ? array.from_scales[row.from_slot * heads + row.head] : 1.0f;
      float scale = 1;
      if (array.to_scales) {
        scale = scale_of(array, row.from, factor);
        if (threadIdx.x % 32 == 0) array.to_scales[row.to_slot * heads + row.head] = scale;
      }
      const bool finite = row.to_slot < params.moved.to_page_size;  // page 0
      for (int i = threadIdx.x % 32; i < array.values; i += 32) {
        const float value = load(array.from_type, row.from, i) * factor / scale;
        store(array.to_type, row.to, i, finite ? made_finite(value, array.to_type) : value);
      }
    });
  }

 private:
  __device__ static float largest_value(int type) {
    switch (type) {
      case f16:
        return 65504.0f;
      case bf16:
        return __uint_as_float(0x7f7f0000);
      case f8e4m3:
        return largest_fp8<f8e4m3>();
      case f8e5m2:
        return largest_fp8<f8e5m2>();
      default:
        return __uint_as_float(0x7f7fffff);
    }
  }
  __device__ static float made_finite(float value, int type) {
    if (!(value == value)) return 0;
    return fminf(fmaxf(value, -largest_value(type)), largest_value(type));
  }

  // Maps the largest finite value of the row to the largest code.
  __device__ static float scale_of(const ConvertedRows& array, const char* from, float factor) {
    float most = 0;
    for (int i = threadIdx.x % 32; i < array.values; i += 32) {
      const float magnitude = fabsf(load(array.from_type, from, i) * factor);
      if (magnitude < infinity()) most = fmaxf(most, magnitude);
    }
    for (int step = 16; step > 0; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    }
    const float exact = most / largest_value(array.to_type);
    return exact >= 0x1p-126f ? exact : 1.0f;
  }

  // An e4m3 code has the bits of an f16 that is 2^8 times smaller, but for NaN.
  __device__ static float from_e4m3(uint32_t code) {
    if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
    return to_float<f16>(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256;
  }

  __device__ static float load(int type, const char* row, int i) {
    switch (type) {
      case f16:
        return to_float<f16>(reinterpret_cast<const uint16_t*>(row)[i]);
      case bf16:
        return to_float<bf16>(reinterpret_cast<const uint16_t*>(row)[i]);
      case f8e4m3:
        return from_e4m3(reinterpret_cast<const uint8_t*>(row)[i]);
      case f8e5m2:
        return to_float<f16>(static_cast<uint16_t>(reinterpret_cast<const uint8_t*>(row)[i] << 8));
      default:
        return reinterpret_cast<const float*>(row)[i];
    }
  }
  __device__ static void store(int type, char* row, int i, float value) {
    switch (type) {
      case f16:
        reinterpret_cast<uint16_t*>(row)[i] = static_cast<uint16_t>(pack<f16>(value, 0));
        break;
      case bf16:
        reinterpret_cast<uint16_t*>(row)[i] = static_cast<uint16_t>(pack<bf16>(value, 0));
        break;
      case f8e4m3:
        reinterpret_cast<uint8_t*>(row)[i] = to_fp8<f8e4m3>(value);
        break;
      case f8e5m2:
        reinterpret_cast<uint8_t*>(row)[i] = to_fp8<f8e5m2>(value);
        break;
      default:
        reinterpret_cast<float*>(row)[i] = value;
    }
  }
};

template <auto kOp>
struct MoveConfig;
template <>
struct MoveConfig<rows> : CopyConfig {};
template <>
struct MoveConfig<values> : ConvertConfig {};

template <auto kOp>
using Config = MoveConfig<kOp>;

}  // namespace fovea::kernels::cuda
