// SPDX-License-Identifier: Apache-2.0
// Thousands of decode passes, replayed in graphs of 100. Their results are finite for any lengths,
// and equal lengths give equal bits. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

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

// Prints an entry in failure messages.
static void PrintTo(const BackendEntry& entry, std::ostream* to) { *to << entry.name; }

namespace {

namespace cuda = kernels::cuda;
using test::serves;
using test::to_device;
using test::to_host;

constexpr int32_t kSteps = 100;  // per graph
constexpr int32_t kRequests = 16, kMaxKeys = 4096, kPage = 64;

// One graph of decode passes over the same queries and keys, each with its own lengths and results.
class DecodeSteps {
 public:
  explicit DecodeSteps(const BackendEntry& entry)
      : test_(serves(entry, "mixed") ? test::mha_case("steps", 8, 2, 128)
                                     : test::mla_case("steps", 16)),
        context_(test::test_device().index),
        noise_(load("measure/noise")),
        not_finite_(load("measure/not_finite")) {
    test_.cache.page_size = kPage;
    test_.cache.layers = 1;
    pool_ = make_kv_pool(test::request_of(test_).cache, 1 + kRequests * kMaxKeys / kPage, device());
    const AttentionSpec& spec = test_.spec;
    q_ = rows(kRequests, spec.q_heads * cached_key_dim(spec));
    elements_ = int64_t{kRequests} * spec.q_heads * cached_value_dim(spec);
    out_ = gpu::DeviceBuffer(static_cast<size_t>(kSteps * elements_) * sizeof(uint16_t));
    std::vector<int32_t> slots(size_t{kRequests} * kMaxKeys), numbers(kRequests + 1);
    std::iota(slots.begin(), slots.end(), kPage);
    std::iota(numbers.begin(), numbers.end(), 0);
    slots_ = to_device(slots);
    numbers_ = to_device(numbers);
    store_keys(entry);
    backend_ = entry.create({.spec = spec, .kv = pool_.get(), .device = device()});
    backend_->reserve({.max_requests = kRequests, .max_tokens = kRequests, .max_kv_len = kMaxKeys});
    gpu::synchronize(nullptr);
    graph_ = gpu::Graph::capture(stream_.get(), [&](Stream stream) { enqueue_steps(stream); });
  }

  // Runs the graph. `lens` is [kSteps, kRequests], up to kMaxKeys. Results hold NaN before.
  void run(const std::vector<int32_t>& lens) {
    gpu::copy_to_device(lens_.data(), lens.data(), lens.size() * sizeof(int32_t), stream_.get());
    gpu::fill_bytes(out_.data(), 0xff, out_.bytes(), stream_.get());
    graph_.launch(stream_.get());
    gpu::synchronize(stream_.get());
  }
  // Returns the number of results that are not finite.
  uint64_t count_not_finite() {
    const gpu::DeviceBuffer found = to_device(std::vector<uint64_t>{0});
    gpu::synchronize(nullptr);
    not_finite_.launch({64}, cuda::NotFiniteParams{out_.data(), all(), found.data<uint64_t>()},
                       nullptr);
    return to_host<uint64_t>(found, 1)[0];
  }
  std::vector<uint16_t> results() const { return to_host<uint16_t>(out_, all()); }
  void poison() {
    gpu::fill_bytes(out_.data(), 0xff, out_.bytes(), nullptr);
    gpu::synchronize(nullptr);
  }
  int64_t all() const { return kSteps * elements_; }

  // Writes memory on another stream while the next kernels run.
  void disturb() {
    if (other_memory_.bytes() == 0) other_memory_ = gpu::DeviceBuffer(size_t{1} << 30);
    const auto count = static_cast<int64_t>(other_memory_.bytes() / sizeof(uint16_t));
    noise_.launch({33}, cuda::NoiseParams{other_memory_.data(), count, count, count, 1, 0, 1},
                  other_.get());
  }

 private:
  Device device() const { return context_.info().device(); }
  cuda::Kernel load(const char* folder) const {
    return cuda::Kernel(cuda::make_variant(cuda::family(folder), {"bf16"}, context_.info().sm),
                        cuda::kernel_store());
  }
  gpu::DeviceBuffer rows(int64_t tokens, int64_t width) {
    const int64_t count = tokens * width;
    gpu::DeviceBuffer values(static_cast<size_t>(count) * sizeof(uint16_t));
    noise_.launch({64}, cuda::NoiseParams{values.data(), count, count, count, ++seed_, 0, 1},
                  nullptr);
    return values;
  }
  BatchView view() const {
    return {.requests = kRequests,
            .request_rows = numbers_.span<int32_t>(),
            .table = {.entries = slots_.data<int32_t>(), .stride = kMaxKeys, .rows = kRequests}};
  }

  // Stores the keys of one request at a time, with a backend of its own.
  void store_keys(const BackendEntry& entry) {
    const AttentionSpec& spec = test_.spec;
    const bool mla = spec.kind == AttentionKind::mla;
    const int32_t k_width = mla ? spec.mla.kv_lora_rank : spec.head_dim;
    const int32_t v_width = mla ? spec.mla.rope_dim : spec.head_dim_v;
    const auto backend = entry.create({.spec = spec, .kv = pool_.get(), .device = device()});
    backend->reserve(
        {.max_requests = 1, .max_tokens = kMaxKeys, .max_q_len = kMaxKeys, .max_kv_len = kMaxKeys});
    std::vector<int64_t> slots(size_t{kRequests} * kMaxKeys);
    std::iota(slots.begin(), slots.end(), kPage);
    const gpu::DeviceBuffer out_slots = to_device(slots);
    const gpu::DeviceBuffer whole = to_device(std::vector<int32_t>{0, kMaxKeys});
    for (int32_t request = 0; request < kRequests; ++request) {
      const gpu::DeviceBuffer k = rows(kMaxKeys, spec.kv_heads * k_width);
      const gpu::DeviceBuffer v = rows(kMaxKeys, spec.kv_heads * v_width);
      BatchView batch = view();
      batch.mode = ForwardMode::extend;
      batch.requests = 1;
      batch.tokens = kMaxKeys;
      batch.q_indptr = whole.span<int32_t>();
      batch.kv_lens = whole.span<int32_t>().subspan(1);
      batch.request_rows = batch.request_rows.subspan(request);
      batch.out_slots = out_slots.span<int64_t>().subspan(size_t{kMaxKeys} * request);
      LayerTensors layer;
      (mla ? layer.mla.latent : layer.k) =
          dense_rows(k.data(), DType::bf16, spec.kv_heads, k_width);
      (mla ? layer.mla.k_rope : layer.v) =
          dense_rows(v.data(), DType::bf16, spec.kv_heads, v_width);
      backend->plan(batch);
      backend->forward(layer);
      gpu::synchronize(nullptr);
    }
  }

  void enqueue_steps(Stream stream) {
    const AttentionSpec& spec = test_.spec;
    BatchView batch = view();
    batch.mode = ForwardMode::decode;
    batch.tokens = kRequests;
    batch.hints.max_q_len = 1;
    batch.hints.max_kv_len = kMaxKeys;
    batch.q_indptr = numbers_.span<int32_t>();
    LayerTensors layer;
    layer.q = dense_rows(q_.data(), DType::bf16, spec.q_heads, cached_key_dim(spec));
    for (int32_t step = 0; step < kSteps; ++step) {
      batch.kv_lens = lens_.span<int32_t>().subspan(size_t{kRequests} * step, kRequests);
      layer.out = dense_rows(out_.data<uint16_t>() + step * elements_, DType::bf16, spec.q_heads,
                             cached_value_dim(spec));
      backend_->plan(batch, stream);
      backend_->forward(layer, stream);
    }
  }

  test::AttentionCase test_;
  const gpu::Context context_;
  const cuda::Kernel noise_, not_finite_;
  uint32_t seed_ = 0;
  gpu::OwnedStream stream_, other_;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  int64_t elements_ = 0;  // results of a step
  gpu::DeviceBuffer q_, out_, slots_, numbers_, other_memory_;
  const gpu::DeviceBuffer lens_{size_t{kSteps} * kRequests * sizeof(int32_t)};
  gpu::Graph graph_;
};

// Returns zero, few or many keys with about equal probability.
int32_t random_length(std::mt19937& random) {
  const double most = std::log(kMaxKeys + 1.0);
  return static_cast<int32_t>(std::exp(std::uniform_real_distribution<>(0, most)(random))) - 1;
}

class ManySteps : public ::testing::TestWithParam<BackendEntry> {};

TEST_P(ManySteps, AnyLengthsGiveFiniteResults) {
  DecodeSteps steps(GetParam());
  steps.poison();
  EXPECT_EQ(steps.count_not_finite(), static_cast<uint64_t>(steps.all())) << "NaN is not seen";
  std::mt19937 random(23);
  std::vector<int32_t> lens(size_t{kSteps} * kRequests);
  for (int32_t replay = 0; replay < 1000 * test::test_scale(); ++replay) {
    std::ranges::generate(lens, [&] { return random_length(random); });
    steps.run(lens);
    ASSERT_EQ(steps.count_not_finite(), 0u) << "replay " << replay;
  }
}

// Meanwhile another stream writes memory now and then.
TEST_P(ManySteps, EqualLengthsGiveEqualBits) {
  DecodeSteps steps(GetParam());
  std::mt19937 random(29);
  std::vector<int32_t> lens(size_t{kSteps} * kRequests);
  for (size_t i = 0; i < lens.size(); ++i) {
    lens[i] = i < kRequests ? random_length(random) : lens[i - kRequests];
  }
  std::vector<uint16_t> first;
  for (int32_t replay = 0; replay < 10 * test::test_scale(); ++replay) {
    if (replay % 2 == 1) steps.disturb();
    steps.run(lens);
    const std::vector<uint16_t> results = steps.results();
    const size_t each = results.size() / kSteps;
    if (first.empty())
      first.assign(results.begin(), results.begin() + static_cast<ptrdiff_t>(each));
    for (size_t step = 0; step < kSteps; ++step) {
      ASSERT_TRUE(std::equal(first.begin(), first.end(),
                             results.begin() + static_cast<ptrdiff_t>(step * each)))
          << "step " << step << " of replay " << replay;
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ManySteps);
INSTANTIATE_TEST_SUITE_P(Builtin, ManySteps, ::testing::ValuesIn(test::gpu_backends()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace fovea
