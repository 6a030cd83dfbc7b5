// SPDX-License-Identifier: Apache-2.0
// Checks that every communicator must pass. All ranks call them together.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/float_types.h"
#include "fovea/communicator.h"

namespace fovea::test {

// Element i of rank r: values whose sums are exact in every type.
inline float rank_value(int rank, int64_t i) {
  return static_cast<float>((rank + 1) * ((i * 7) % 5 - 2));
}

inline float expected_value(int ranks, int64_t i, ReduceOp op) {
  float result = rank_value(0, i);
  for (int rank = 1; rank < ranks; ++rank) {
    const float value = rank_value(rank, i);
    result = op == ReduceOp::sum ? result + value : std::max(result, value);
  }
  return result;
}

// `count` elements of one type, addressed as floats.
class Values {
 public:
  Values(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count) * dtype_bytes(dtype) + 1) {}

  void* data() { return bytes_.data(); }
  void* part(int64_t first) {
    return bytes_.data() + static_cast<size_t>(first) * dtype_bytes(dtype_);
  }
  void set(int64_t i, float value) {
    if (dtype_ == DType::i32) {
      static_cast<int32_t*>(data())[i] = static_cast<int32_t>(value);
    } else if (dtype_ == DType::i64) {
      static_cast<int64_t*>(data())[i] = static_cast<int64_t>(value);
    } else {
      store_float(data(), dtype_, i, value);
    }
  }
  float get(int64_t i) {
    if (dtype_ == DType::i32) return static_cast<float>(static_cast<int32_t*>(data())[i]);
    if (dtype_ == DType::i64) return static_cast<float>(static_cast<int64_t*>(data())[i]);
    return load_float(data(), dtype_, i);
  }

 private:
  DType dtype_;
  std::vector<char> bytes_;
};

inline void check_reductions(Communicator& ranks, DType dtype, ReduceOp op, int64_t count) {
  SCOPED_TRACE(testing::Message() << dtype_name(dtype) << " x " << count << ", rank "
                                  << ranks.rank() << " of " << ranks.size());
  const int size = ranks.size(), rank = ranks.rank();
  for (const bool in_place : {false, true}) {
    Values send(dtype, count), receive(dtype, count);
    for (int64_t i = 0; i < count; ++i) send.set(i, rank_value(rank, i));
    Values& result = in_place ? send : receive;
    ranks.all_reduce(send.data(), result.data(), count, dtype, op);
    for (int64_t i = 0; i < count; ++i) EXPECT_EQ(result.get(i), expected_value(size, i, op)) << i;

    Values parts(dtype, size * count), own(dtype, count);
    for (int64_t i = 0; i < size * count; ++i) parts.set(i, rank_value(rank, i));
    void* const target = in_place ? parts.part(rank * count) : own.data();
    ranks.reduce_scatter(parts.data(), target, count, dtype, op);
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(in_place ? parts.get(rank * count + i) : own.get(i),
                expected_value(size, rank * count + i, op))
          << i;
    }
  }
}

inline void check_exchanges(Communicator& ranks, int64_t count) {
  SCOPED_TRACE(testing::Message() << count << " values, rank " << ranks.rank() << " of "
                                  << ranks.size());
  const int size = ranks.size(), rank = ranks.rank();
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  for (const bool in_place : {false, true}) {
    Values send(DType::f32, count), all(DType::f32, size * count);
    for (int64_t i = 0; i < count; ++i) {
      if (in_place) {
        all.set(rank * count + i, rank_value(rank, i));
      } else {
        send.set(i, rank_value(rank, i));
      }
    }
    ranks.all_gather(in_place ? all.part(rank * count) : send.data(), all.data(), bytes);
    for (int64_t i = 0; i < size * count; ++i) {
      EXPECT_EQ(all.get(i), rank_value(static_cast<int>(i / count), i % count)) << i;
    }
  }
  Values send(DType::f32, size * count), receive(DType::f32, size * count);
  for (int64_t i = 0; i < size * count; ++i) send.set(i, rank_value(rank, i));
  ranks.all_to_all(send.data(), receive.data(), bytes);
  for (int64_t i = 0; i < size * count; ++i) {
    EXPECT_EQ(receive.get(i), rank_value(static_cast<int>(i / count), rank * count + i % count));
  }
  for (int root = 0; root < size; ++root) {
    Values data(DType::f32, count);
    for (int64_t i = 0; i < count; ++i) data.set(i, rank_value(rank, i));
    ranks.broadcast(data.data(), bytes, root);
    for (int64_t i = 0; i < count; ++i) EXPECT_EQ(data.get(i), rank_value(root, i)) << i;
  }
  ranks.barrier();
}

// Every collective, with counts around the number of ranks and around a block of the sums.
inline void check_collectives(Communicator& ranks) {
  for (const int64_t count : {0, 1, 2, 3, 7, 511, 513, 1700}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i32, DType::i64}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
        check_reductions(ranks, dtype, op, count);
      }
    }
    check_exchanges(ranks, count);
  }
  ranks.check();
}

}  // namespace fovea::test
