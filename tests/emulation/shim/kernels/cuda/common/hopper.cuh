// SPDX-License-Identifier: Apache-2.0
// Replaces src/kernels/cuda/common/hopper.cuh with the same names, in C++.
#pragma once

#include "emulation/tensor_map.h"
#include "kernels/cuda/common/e4m3.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/tensor_map.h"

namespace fovea::kernels::cuda {

constexpr int kWarpgroupThreads = 128;

inline int grid_blocks_anew() { return static_cast<int>(gridDim.x); }

inline bool elect_lane() { return machine_of::lane() == 0; }
inline const void* shared_pointer(uint32_t address) {
  return machine_of::machine.shared_pointer(address);
}

struct alignas(8) TransactionBarrier {
  uint64_t state;

  void init(int arrivals) { machine_of::machine.init_barrier(shared_address(this), arrivals); }
  void arrive() { machine_of::machine.arrive(shared_address(this)); }
  void arrive_expecting(int bytes) {
    machine_of::machine.barrier(shared_address(this)).expect(bytes);
    machine_of::machine.arrive(shared_address(this));
  }
  void arrive_after_copies() { machine_of::machine.arrive_after_copies(shared_address(this)); }
  void wait(uint32_t parity) { machine_of::machine.wait_barrier(shared_address(this), parity); }
};

inline void store_matrices(void* shared, const uint32_t (&r)[4]) {
  struct Row {
    void* to;
    uint32_t r[4];
  };
  const auto& all =
      machine_of::meet_warp("stmatrix.x4", ~0u, Row{shared, {r[0], r[1], r[2], r[3]}});
  // Lane l stores row l % 8 of matrix l / 8, which four lanes hold.
  const int lane = machine_of::lane();
  if (reinterpret_cast<uintptr_t>(shared) % 16) machine_of::machine.fail("a misaligned matrix row");
  for (int i = 0; i < 4; ++i) static_cast<uint32_t*>(shared)[i] = all[lane % 8 * 4 + i].r[lane / 8];
}

inline void store_matrices_transposed(void* shared, const uint32_t (&r)[4]) {
  struct Row {
    void* to;
    uint32_t r[4];
  };
  const auto& all =
      machine_of::meet_warp("stmatrix.x4.trans", ~0u, Row{shared, {r[0], r[1], r[2], r[3]}});
  // Row l % 8 in memory is a column of the lanes' values.
  const int lane = machine_of::lane();
  if (reinterpret_cast<uintptr_t>(shared) % 16) machine_of::machine.fail("a misaligned matrix row");
  for (int i = 0; i < 8; ++i) {
    static_cast<uint16_t*>(shared)[i] =
        static_cast<uint16_t>(all[i * 4 + lane % 8 / 2].r[lane / 8] >> lane % 2 * 16);
  }
}

inline void fence_barrier_init() { machine_of::machine.fence_barriers(); }
inline void fence_async_proxy() {}

inline const machine_of::EncodedTensorMap& encoded(const TensorMap& map) {
  const auto& encoded = reinterpret_cast<const machine_of::EncodedTensorMap&>(map);
  if (encoded.tag != machine_of::EncodedTensorMap::kTag) machine_of::machine.fail("no tensor map");
  return encoded;
}
inline void prefetch_tensor_map(const TensorMap& map) { encoded(map); }

constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

inline void load_bytes(void* shared, const void* global, int bytes, TransactionBarrier& barrier,
                       uint64_t) {
  const uint32_t to = shared_address(shared);
  if ((to | static_cast<uint32_t>(bytes) | reinterpret_cast<uintptr_t>(global)) % 16 != 0) {
    machine_of::machine.fail("a misaligned bulk copy");
  }
  machine_of::machine.copy_bulk(
      to, static_cast<uint32_t>(bytes), shared_address(&barrier),
      [=](char* place) { std::memcpy(place, global, static_cast<size_t>(bytes)); });
}

inline void load_bytes(void* shared, const void* global, int bytes, TransactionBarrier& barrier) {
  load_bytes(shared, global, bytes, barrier, kEvictNormal);
}

// The addresses may be those of another block.
inline void load_box_at(uint32_t to, const TensorMap& map, uint32_t barrier,
                        const machine_of::EncodedTensorMap::Coordinates& at) {
  if (to % 128 != 0) machine_of::machine.fail("a misaligned box");
  const auto& box = encoded(map);
  machine_of::machine.copy_bulk(to, box.box_bytes(), barrier, [=](char* place) {
    box.for_each_chunk(at, [&](uint32_t offset, const char* from, size_t live) {
      char* chunk = place + (box.swizzled(to + offset) - to);
      std::memset(chunk, 0, 16);
      if (live > 0) std::memcpy(chunk, from, live);
    });
  });
}
inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier, int c0,
                     int c1) {
  load_box_at(shared_address(shared), map, shared_address(&barrier), {c0, c1});
}
inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier, int c0,
                     int c1, int c2) {
  load_box_at(shared_address(shared), map, shared_address(&barrier), {c0, c1, c2});
}
inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier, uint64_t,
                     int c0, int c1, int c2) {
  load_box_at(shared_address(shared), map, shared_address(&barrier), {c0, c1, c2});
}
inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier, uint64_t,
                     int c0, int c1, int c2, int c3) {
  load_box_at(shared_address(shared), map, shared_address(&barrier), {c0, c1, c2, c3});
}
inline void load_box(void* shared, const TensorMap& map, TransactionBarrier& barrier, uint64_t,
                     int c0, int c1, int c2, int c3, int c4) {
  load_box_at(shared_address(shared), map, shared_address(&barrier), {c0, c1, c2, c3, c4});
}

inline void prefetch_box(const TensorMap& map, int, int, int, int) { encoded(map); }
inline void prefetch_box(const TensorMap& map, int, int, int, int, int) { encoded(map); }
inline void prefetch_box(const TensorMap& map, uint64_t, int, int, int, int) { encoded(map); }

inline void store_box(const TensorMap& map, const void* shared, int c0, int c1, int c2) {
  const uint32_t from = shared_address(shared);
  if (from % 128 != 0) machine_of::machine.fail("a misaligned box");
  machine_of::machine.store_bulk(
      [box = encoded(map), from, shared = static_cast<const char*>(shared), c0, c1, c2] {
        box.for_each_chunk({c0, c1, c2}, [&](uint32_t offset, char* to, size_t live) {
          if (live > 0) std::memcpy(to, shared + (box.swizzled(from + offset) - from), live);
        });
      });
}
inline void store_bytes(void* global, const void* shared, int bytes) {
  if ((shared_address(shared) | static_cast<uint32_t>(bytes) |
       reinterpret_cast<uintptr_t>(global)) %
          16 !=
      0) {
    machine_of::machine.fail("a misaligned bulk copy");
  }
  machine_of::machine.store_bulk([=] { std::memcpy(global, shared, static_cast<size_t>(bytes)); });
}
inline void commit_stores() { machine_of::machine.commit_stores(); }
template <int = 0>
inline void wait_stores_read() {
  machine_of::machine.wait_stores_read();
}

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void give_registers() {}

inline void named_barrier_wait(int id, int threads) {
  machine_of::machine.named_barrier(id, threads, true);
}
inline void named_barrier_arrive(int id, int threads) {
  machine_of::machine.named_barrier(id, threads, false);
}

inline bool named_barrier_any(int id, int threads, bool value) {
  return machine_of::machine.named_barrier(id, threads, true, value) != 0;
}

template <Type kFrom>
uint32_t widen(uint32_t two) {
  if constexpr (kFrom == f8e4m3) {
    return widen_e4m3(two);
  } else {
    return pack<f16>(f8e5m2_to_float(static_cast<uint8_t>(two)),
                     f8e5m2_to_float(static_cast<uint8_t>(two >> 8)));
  }
}

template <Type kFrom>
uint32_t widen_upper(uint32_t four) {
  return widen<kFrom>(four >> 16);
}

}  // namespace fovea::kernels::cuda
