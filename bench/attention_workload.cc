// SPDX-License-Identifier: Apache-2.0
#include "bench/attention_workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/float_types.h"
#include "fovea/device.h"
#include "kernels/cpu/cpu.h"

namespace fovea::bench {
namespace {

// Min size of the memory over which caches rotate, so that no layer is in a CPU cache when its turn
// comes again.
constexpr double kColdBytes = 640e6;
constexpr int32_t kMaxLayers = 64;
constexpr int kSampledRows = 6;

// Normal values with a period that has no common factor with any stride.
class NoiseTable {
 public:
  NoiseTable() : values_((1 << 20) + 7) {
    std::mt19937 generator(20261121);
    std::normal_distribution<float> normal;
    for (float& value : values_) value = normal(generator);
  }
  std::vector<std::byte> draw(size_t count, DType dtype) {
    std::vector<std::byte> drawn(count * dtype_bytes(dtype));
    for (size_t i = 0; i < count; ++i) {
      store_float(drawn.data(), dtype, static_cast<int64_t>(i), values_[next_]);
      if (++next_ == values_.size()) next_ = 0;
    }
    return drawn;
  }

 private:
  std::vector<float> values_;
  size_t next_ = 0;
};

KvCacheSpec cache_of(const AttentionCase& config, int32_t layers) {
  KvCacheSpec spec;
  spec.order = KvOrder::hnd;  // as in the engine on a CPU
  spec.dtype = config.kv_dtype;
  spec.scale = is_fp8(config.kv_dtype) ? KvScale::per_token_head : KvScale::none;
  spec.layers = layers;
  spec.kv_heads = config.kv_heads;
  spec.head_dim = spec.head_dim_v = config.head_dim;
  spec.page_size = config.page_size;
  return spec;
}

}  // namespace

Workload::Workload(const AttentionCase& config, ThreadPool& threads, const std::string& wish)
    : config_(config) {
  const int64_t pages_per_request = (config.kv_len + config.page_size - 1) / config.page_size;
  const int64_t pages = config.batch * pages_per_request + 1;
  const double layer_bytes =
      static_cast<double>(cache_of(config, 1).bytes_per_page()) * static_cast<double>(pages);
  if (config.phase == "decode") {
    layers_ = static_cast<int32_t>(std::clamp(kColdBytes / layer_bytes, 1.0, double{kMaxLayers}));
  }

  BackendRequest request;
  request.spec.q_heads = config.q_heads;
  request.spec.kv_heads = config.kv_heads;
  request.spec.head_dim = request.spec.head_dim_v = config.head_dim;
  request.spec.q_dtype = config.q_dtype;
  request.cache = cache_of(config, layers_);
  request.limits = {.max_requests = config.batch,
                    .max_tokens = config.batch * config.q_len,
                    .max_q_len = config.q_len,
                    .max_kv_len = config.kv_len};
  request.device = cpu_device();
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection selection = select_backend(registry, request, parse_backend_wish(wish));
  name_ = selection.chosen->name;
  pool_ = make_kv_pool(request.cache, pages);
  backend_ =
      selection.chosen->create({.spec = request.spec, .kv = pool_.get(), .threads = &threads});
  backend_->reserve(request.limits);
  place_requests();

  NoiseTable noise;
  const auto requests = static_cast<size_t>(config.batch);
  k_ = noise.draw(requests * config.kv_len * row_elements(), config.q_dtype);
  v_ = noise.draw(requests * config.kv_len * row_elements(), config.q_dtype);
  q_ = noise.draw(requests * config.q_len * config.q_heads * config.head_dim, config.q_dtype);
  out_.assign(q_.size(), std::byte{0xff});
  if (prefix() > 0) fill_cache(threads);
}

void Workload::forward(int32_t layer) {
  LayerTensors tensors;
  tensors.layer = layer;
  tensors.q = dense_rows(q_.data(), config_.q_dtype, config_.q_heads, config_.head_dim);
  const size_t first_new = new_row(0) * row_elements() * dtype_bytes(config_.q_dtype);
  tensors.k =
      dense_rows(k_.data() + first_new, config_.q_dtype, config_.kv_heads, config_.head_dim);
  tensors.v =
      dense_rows(v_.data() + first_new, config_.q_dtype, config_.kv_heads, config_.head_dim);
  tensors.out = dense_rows(out_.data(), config_.q_dtype, config_.q_heads, config_.head_dim);
  backend_->forward(tensors);
}

// Places pages in random order, as in a pool after hours of service.
void Workload::place_requests() {
  const int32_t page = config_.page_size;
  const int32_t pages_per_request = (config_.kv_len + page - 1) / page;
  std::vector<int32_t> pages(static_cast<size_t>(config_.batch * pages_per_request));
  std::iota(pages.begin(), pages.end(), 1);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(7));
  q_indptr_.push_back(0);
  for (int32_t r = 0; r < config_.batch; ++r) {
    for (int32_t t = 0; t < config_.kv_len; ++t) {
      request_slots_.push_back(pages[static_cast<size_t>(r * pages_per_request + t / page)] * page +
                               t % page);
      if (t >= prefix()) out_slots_.push_back(request_slots_.back());
    }
    request_rows_.push_back(r);
    kv_lens_.push_back(config_.kv_len);
    q_indptr_.push_back((r + 1) * config_.q_len);
  }
  batch_.mode = config_.phase == "decode" ? ForwardMode::decode : ForwardMode::extend;
  batch_.requests = config_.batch;
  batch_.tokens = config_.batch * config_.q_len;
  batch_.hints.max_q_len = config_.q_len;
  batch_.hints.max_kv_len = config_.kv_len;
  batch_.q_indptr = q_indptr_;
  batch_.kv_lens = kv_lens_;
  batch_.request_rows = request_rows_;
  batch_.table = {
      .entries = request_slots_.data(), .stride = config_.kv_len, .rows = config_.batch};
  batch_.out_slots = out_slots_;
}

void Workload::fill_cache(ThreadPool& threads) {
  std::vector<int64_t> slots;
  for (int32_t r = 0; r < config_.batch; ++r) {
    for (int32_t t = 0; t < prefix(); ++t) {
      slots.push_back(request_slots_[static_cast<size_t>(r) * config_.kv_len + t]);
    }
  }
  for (int32_t layer = 0; layer < layers_; ++layer) {
    kernels::KvWriteParams params;
    params.cache = pool_->layer(layer);
    params.k = dense_rows(k_.data(), config_.q_dtype, config_.kv_heads, config_.head_dim);
    params.v = dense_rows(v_.data(), config_.q_dtype, config_.kv_heads, config_.head_dim);
    params.slots = slots.data();
    params.tokens = static_cast<int32_t>(slots.size());
    params.kv_heads = config_.kv_heads;
    params.head_dim = params.head_dim_v = config_.head_dim;
    kernels::cpu::kv_write(params, threads);
  }
}

double Workload::row_error(int32_t request, int32_t row, int32_t head, double& norm) const {
  const auto dim = static_cast<size_t>(config_.head_dim);
  const int32_t kv_head = head / (config_.q_heads / config_.kv_heads);
  const size_t q_at =
      ((static_cast<size_t>(request) * config_.q_len + row) * config_.q_heads + head) * dim;
  const int32_t visible = prefix() + row + 1;
  std::vector<double> weights(static_cast<size_t>(visible));
  const auto kv_at = [&](int32_t token) {
    return row_of(request, token) * row_elements() + static_cast<size_t>(kv_head) * dim;
  };
  const auto value = [&](const std::vector<std::byte>& values, size_t index) {
    return double{load_float(values.data(), config_.q_dtype, static_cast<int64_t>(index))};
  };
  double largest = -1e300;
  for (int32_t t = 0; t < visible; ++t) {
    double dot = 0;
    for (size_t d = 0; d < dim; ++d) {
      dot += value(q_, q_at + d) * value(k_, kv_at(t) + d);
    }
    weights[static_cast<size_t>(t)] = dot / std::sqrt(static_cast<double>(dim));
    largest = std::max(largest, weights[static_cast<size_t>(t)]);
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  double squared_error = 0;
  for (size_t d = 0; d < dim; ++d) {
    double expected = 0;
    for (int32_t t = 0; t < visible; ++t) {
      expected += weights[static_cast<size_t>(t)] / sum * value(v_, kv_at(t) + d);
    }
    const double difference = value(out_, q_at + d) - expected;
    squared_error += difference * difference;
    norm += expected * expected;
  }
  return squared_error;
}

double Workload::error() const {
  std::mt19937 generator(3);
  double squared_error = 0;
  double norm = 0;
  for (int i = 0; i < kSampledRows; ++i) {
    const auto pick = [&](int32_t bound) {
      return static_cast<int32_t>(generator() % static_cast<uint32_t>(bound));
    };
    squared_error +=
        row_error(pick(config_.batch), i == 0 ? config_.q_len - 1 : pick(config_.q_len),
                  pick(config_.q_heads), norm);
  }
  return std::sqrt(squared_error / norm);
}

}  // namespace fovea::bench
