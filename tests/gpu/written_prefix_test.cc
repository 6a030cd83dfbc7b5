// SPDX-License-Identifier: Apache-2.0
// BatchHints::prefix_written: a decode that reads earlier keys before the preceding kernel ends
// still sees the keys that its own pass stores, and so does a prompt. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "fovea/select_backend.h"
#include "kernels/cuda/common/measure_params.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/store.h"
#include "support/cases.h"
#include "support/device_array.h"
#include "support/run_backend.h"
#include "support/test_device.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

using test::to_device;
using test::to_host;

constexpr int32_t kHeads = 8, kKvHeads = 2, kDim = 128;
constexpr int32_t kLatent = 512, kRow = 576;  // MLA, with its RoPE columns
constexpr int32_t kLayers = 6;
constexpr int32_t kMaxKeys = 1300;

struct Shape {
  std::string backend;
  DType cache;
  int32_t page_size;
  int32_t new_tokens;  // per request
  std::vector<int32_t> lens;
  bool batch_invariant = false;
  int32_t latent_heads = 0;  // > 0: MLA with this many heads
};

// Prints a shape in failure messages.
void PrintTo(const Shape& shape, std::ostream* to) {
  *to << shape.backend << ", " << dtype_name(shape.cache) << ", pages of " << shape.page_size
      << ", " << shape.new_tokens << " new tokens, " << shape.lens.size() << " requests"
      << (shape.batch_invariant ? ", batch-invariant" : "");
  if (shape.latent_heads > 0) *to << ", " << shape.latent_heads << " latent heads";
}

// A graph of one pass over all layers. The rows of new tokens hold NaN before it; each layer stores
// its own, then attends; at the end all layers attend again.
class Passes {
 public:
  Passes(const BackendEntry& entry, const Shape& shape) : shape_(shape) {
    test::AttentionCase test = latent() ? test::mla_case("written", shape.latent_heads)
                                        : test::mha_case("written", kHeads, kKvHeads, kDim);
    test.spec.q_dtype = DType::bf16;
    test.spec.batch_invariant = shape.batch_invariant;
    test.cache.dtype = shape.cache;
    if (is_fp8(shape.cache)) test.cache.scale = KvScale::per_token_head;
    test.cache.page_size = shape.page_size;
    KvCacheSpec cache = test::request_of(test).cache;
    cache.layers = kLayers;
    const Device device = test::test_device().device();
    const auto requests = static_cast<int32_t>(shape.lens.size());
    const int32_t stride = (kMaxKeys + shape.page_size - 1) / shape.page_size * shape.page_size;
    pool_ = make_kv_pool(cache, 1 + requests * (stride / shape.page_size), device);
    backend_ = entry.create({.spec = test.spec, .kv = pool_.get(), .device = device});
    backend_->reserve({.max_requests = requests,
                       .max_tokens = requests * kMaxKeys,
                       .max_q_len = kMaxKeys,
                       .max_kv_len = kMaxKeys});
    std::vector<int32_t> slots(static_cast<size_t>(requests) * stride), rows(shape.lens.size());
    std::iota(slots.begin(), slots.end(), shape.page_size);
    std::iota(rows.begin(), rows.end(), 0);
    slots_ = to_device(slots);
    rows_ = to_device(rows);
    lens_ = to_device(shape.lens);
    stride_ = stride;
    tokens_ = requests * shape.new_tokens;
    std::vector<int64_t> earlier_slots, new_slots;
    std::vector<int32_t> earlier(1, 0), fresh(1, 0);
    for (int32_t r = 0; r < requests; ++r) {
      for (int32_t t = 0; t < shape.lens[r]; ++t) {
        const bool is_new = t >= shape.lens[r] - shape.new_tokens;
        (is_new ? new_slots : earlier_slots).push_back(slots[r * stride + t]);
      }
      earlier.push_back(static_cast<int32_t>(earlier_slots.size()));
      fresh.push_back(static_cast<int32_t>(new_slots.size()));
    }
    earlier_tokens_ = earlier.back();
    earlier_slots_ = to_device(earlier_slots);
    new_slots_ = to_device(new_slots);
    earlier_ = to_device(earlier);
    fresh_ = to_device(fresh);
    const size_t most = std::max(earlier_slots.size(), new_slots.size());
    const auto kv = static_cast<size_t>(kv_values());
    k_ = noise(most * kv * kLayers, 1);
    if (!latent()) v_ = noise(most * kv * kLayers, 2);
    q_ = noise(new_slots.size() * static_cast<size_t>(q_values()) * kLayers, 3);
    nan_ = to_device(std::vector<uint16_t>(new_slots.size() * kv, 0x7fff));
    out_ = gpu::DeviceBuffer(static_cast<size_t>(2 * out_elements()) * sizeof(uint16_t));
    store(earlier_tokens_, earlier_, earlier_slots_, false, nullptr);
    gpu::synchronize(nullptr);
  }

  // Stores the new keys and keeps a copy of the caches. In run() a kernel copies it back, long
  // after it has let the next one start.
  void store_late() {
    store(tokens_, fresh_, new_slots_, false, nullptr);
    const gpu::Context context(test::test_device().index);
    late_copy_ = cuda::Kernel(
        cuda::make_variant(cuda::family("measure/late_copy"), {"256"}, context.info().sm),
        cuda::kernel_store());
    for (int32_t number = 0; number < kLayers; ++number) {
      const CacheBytes cache = cache_bytes(number);
      stored_.emplace_back(static_cast<size_t>(cache.count));
      late_copy_.launch(
          {64}, cuda::LateCopyParams{cache.begin, stored_.back().data(), cache.count, 0}, nullptr);
    }
    gpu::synchronize(nullptr);
  }

  std::vector<uint16_t> run(bool written, int32_t replays) {
    const gpu::Graph graph = gpu::Graph::capture(stream_.get(), [&](Stream stream) {
      store(tokens_, fresh_, new_slots_, true, stream);
      BatchView batch = view(tokens_, fresh_, new_slots_);
      batch.mode = shape_.new_tokens == 1 ? ForwardMode::decode : ForwardMode::extend;
      batch.hints.max_q_len = shape_.new_tokens;
      batch.hints.max_kv_len = std::ranges::max(shape_.lens);
      batch.hints.prefix_written = written;
      backend_->plan(batch, stream);
      for (int32_t number = 0; number < kLayers; ++number) {
        LayerTensors layer = tensors(number);
        if (!stored_.empty()) {
          const CacheBytes cache = cache_bytes(number);
          const void* from = stored_[static_cast<size_t>(number)].data();
          constexpr int64_t kCycles = 20000;
          late_copy_.launch({4}, cuda::LateCopyParams{from, cache.begin, cache.count, kCycles},
                            stream);
          layer.save_kv = false;
        }
        backend_->forward(layer, stream);
      }
      // Again, with nothing between the launches.
      for (int32_t number = 0; number < kLayers; ++number) {
        LayerTensors layer = tensors(number);
        layer.save_kv = false;
        layer.out.data = static_cast<uint16_t*>(layer.out.data) + out_elements();
        backend_->forward(layer, stream);
      }
    });
    std::vector<uint16_t> first;
    for (int32_t i = 0; i < replays; ++i) {
      gpu::fill_bytes(out_.data(), 0xff, out_.bytes(), stream_.get());
      graph.launch(stream_.get());
      gpu::synchronize(stream_.get());
      const auto count = static_cast<size_t>(out_elements());
      const std::vector<uint16_t> now = to_host<uint16_t>(out_, 2 * count);
      if (first.empty()) first.assign(now.begin(), now.begin() + out_elements());
      for (const size_t from : {size_t{0}, count}) {
        EXPECT_TRUE(
            std::equal(first.begin(), first.end(), now.begin() + static_cast<int64_t>(from)))
            << "replay " << i << (from > 0 ? ", attending again" : "");
      }
    }
    return first;
  }

 private:
  bool latent() const { return shape_.latent_heads > 0; }
  // Elements per token: of K, of Q, of the output.
  int64_t kv_values() const { return latent() ? kRow : int64_t{kKvHeads} * kDim; }
  int64_t q_values() const {
    return latent() ? int64_t{shape_.latent_heads} * kRow : int64_t{kHeads} * kDim;
  }
  int64_t out_values() const {
    return latent() ? int64_t{shape_.latent_heads} * kLatent : int64_t{kHeads} * kDim;
  }
  int64_t out_elements() const { return int64_t{kLayers} * tokens_ * out_values(); }
  static gpu::DeviceBuffer noise(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    constexpr size_t kPeriod = 65537;  // a prime: rows differ
    std::vector<uint16_t> values(count);
    for (size_t i = 0; i < std::min(count, kPeriod); ++i) {
      store_float(reinterpret_cast<char*>(values.data()), DType::bf16, static_cast<int64_t>(i),
                  normal(random));
    }
    for (size_t i = kPeriod; i < count; ++i) values[i] = values[i - kPeriod];
    return to_device(values);
  }
  BatchView view(int32_t tokens, const gpu::DeviceBuffer& indptr,
                 const gpu::DeviceBuffer& slots) const {
    BatchView batch;
    batch.mode = ForwardMode::extend;
    batch.requests = static_cast<int32_t>(shape_.lens.size());
    batch.tokens = tokens;
    batch.q_indptr = indptr.span<int32_t>();
    batch.kv_lens = lens_.span<int32_t>();
    batch.request_rows = rows_.span<int32_t>();
    batch.table.rows = batch.requests;
    batch.table.entries = slots_.data<int32_t>();
    batch.table.stride = stride_;
    batch.out_slots = slots.span<int64_t>();
    return batch;
  }
  void poison_keys(LayerTensors& layer) const {
    if (latent()) {
      layer.mla.latent.data = layer.mla.k_rope.data = nan_.data();
    } else {
      layer.k.data = layer.v.data = nan_.data();
    }
  }
  // Stores the new keys of every layer, without attending.
  void store(int32_t tokens, const gpu::DeviceBuffer& indptr, const gpu::DeviceBuffer& slots,
             bool poison, Stream stream) {
    backend_->plan(view(tokens, indptr, slots), stream);
    for (int32_t number = 0; number < kLayers; ++number) {
      LayerTensors layer = tensors(number);
      layer.q = layer.out = {};
      if (poison) poison_keys(layer);
      backend_->forward(layer, stream);
    }
  }
  // The bytes of a layer's K and V.
  struct CacheBytes {
    char* begin;
    int64_t count;
  };
  CacheBytes cache_bytes(int32_t number) const {
    const KvLayerView layer = pool_->layer(number);  // V follows K
    const char* end = latent() ? k_address(layer, layer.slots - 1, 0)
                               : v_address(layer, layer.slots - 1, kKvHeads);
    return {layer.k, end - layer.k};
  }
  LayerTensors tensors(int32_t number) {
    LayerTensors layer;
    layer.layer = number;
    // Each layer has other rows; those of earlier tokens overlap.
    const int64_t before = int64_t{number} * tokens_;
    uint16_t* k = k_.data<uint16_t>() + before * kv_values();
    uint16_t* q = q_.data<uint16_t>() + before * q_values();
    uint16_t* out = out_.data<uint16_t>() + before * out_values();
    if (latent()) {
      layer.mla.latent = {k, DType::bf16, kRow, kRow};
      layer.mla.k_rope = {k + kLatent, DType::bf16, kRow, kRow};
      layer.q = dense_rows(q, DType::bf16, shape_.latent_heads, kRow);
      layer.out = dense_rows(out, DType::bf16, shape_.latent_heads, kLatent);
    } else {
      layer.k = dense_rows(k, DType::bf16, kKvHeads, kDim);
      layer.v = dense_rows(v_.data<uint16_t>() + before * kv_values(), DType::bf16, kKvHeads, kDim);
      layer.q = dense_rows(q, DType::bf16, kHeads, kDim);
      layer.out = dense_rows(out, DType::bf16, kHeads, kDim);
    }
    return layer;
  }

  const Shape shape_;
  gpu::OwnedStream stream_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  int32_t stride_ = 0, tokens_ = 0, earlier_tokens_ = 0;
  gpu::DeviceBuffer slots_, rows_, lens_, earlier_slots_, new_slots_, earlier_, fresh_;
  gpu::DeviceBuffer k_, v_, q_, nan_, out_;
  cuda::Kernel late_copy_;
  std::vector<gpu::DeviceBuffer> stored_;  // by layer
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const BackendEntry& entry : test::gpu_backends()) {
    if (!test::serves(entry, "mixed")) continue;
    const std::vector<int32_t> many(40, 257);
    // Prompts with more row tiles than blocks: they share counters with the layer before.
    const std::vector<int32_t> prompts = {1090, 1000, 1024, 1025};
    all.push_back({entry.name, DType::bf16, 64, 1000, prompts});
    all.push_back({entry.name, DType::bf16, 64, 1000, prompts, true});
    all.push_back({entry.name, DType::bf16, 1, 1000, prompts});
    all.push_back({entry.name, DType::f8e4m3, 16, 1000, prompts});
    for (const std::vector<int32_t>& lens :
         {std::vector<int32_t>{1090}, {3, 17, 130, 1000, 1024, 1025, 515}, many}) {
      for (const int32_t page : {1, 16, 64}) {
        for (const DType cache : {DType::bf16, DType::f8e4m3}) {
          for (const int32_t tokens : {1, 3})
            all.push_back({entry.name, cache, page, tokens, lens});
        }
        // Up to 8 rows use a kernel of their own.
        for (const int32_t tokens : {1, 2}) {
          all.push_back({entry.name, DType::bf16, page, tokens, lens, true});
        }
      }
    }
    // Parts in clusters of two and three, with and without the promise, that do not fit the rings.
    for (const std::vector<int32_t>& lens :
         {std::vector<int32_t>(25, 1000), std::vector<int32_t>(17, 1250)}) {
      for (const int32_t page : {1, 64}) {
        for (const DType cache : {DType::bf16, DType::f8e4m3}) {
          all.push_back({entry.name, cache, page, 1, lens});
        }
      }
    }
    // So many row tiles that clusters share segments only if all requests are known to be short.
    const std::vector<int32_t> some(30, 257);
    all.push_back({entry.name, DType::bf16, 16, 1, some, true});
    all.push_back({entry.name, DType::bf16, 64, 2, some, true});
  }
  // MLA with one to four blocks of rows, joined in clusters, by blocks, in pairs and by the merge.
  // Two of the three new tokens of 1025 are in a key tile of earlier tokens.
  for (const BackendEntry& entry : test::gpu_backends()) {
    if (!test::serves(entry, "mla_page_16")) continue;
    for (const std::vector<int32_t>& lens : {std::vector<int32_t>{1090},
                                             {3, 17, 130, 1000, 1024, 1025, 515},
                                             std::vector<int32_t>(30, 257)}) {
      for (const int32_t page : {1, 16, 64}) {
        for (const int32_t heads : {16, 128}) {
          for (const int32_t tokens : {1, 3}) {
            all.push_back({entry.name, DType::bf16, page, tokens, lens, false, heads});
          }
        }
      }
    }
  }
  return all;
}

class WrittenPrefix : public ::testing::TestWithParam<Shape> {};

TEST_P(WrittenPrefix, NewKeysAreSeenAsTheyAreStored) {
  const Shape& shape = GetParam();
  for (const BackendEntry& entry : test::gpu_backends()) {
    if (entry.name != shape.backend) continue;
    Passes passes(entry, shape);
    const std::vector<uint16_t> want = passes.run(false, 2);
    for (const uint16_t value : want) ASSERT_LT(value & 0x7fff, 0x7f80) << "not finite";
    EXPECT_EQ(passes.run(true, 20), want);
    if (is_fp8(shape.cache)) continue;  // their scales lie elsewhere
    passes.store_late();
    EXPECT_EQ(passes.run(true, 2), want) << "stored late";
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(WrittenPrefix);
INSTANTIATE_TEST_SUITE_P(Builtin, WrittenPrefix, ::testing::ValuesIn(shapes()));

}  // namespace
}  // namespace fovea
