// SPDX-License-Identifier: Apache-2.0
#include "bench/attention_suite.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>

#include "fovea/device.h"
#include "fovea/error.h"
#include "kernels/cpu/cpu.h"

namespace fovea::bench {
namespace {

// Caches rotate over at least this much memory, so that no layer is still in a cache when its turn
// comes again.
constexpr double kColdBytes = 640e6;
constexpr int32_t kMaxLayers = 64;
constexpr double kRoundSeconds = 0.01;  // as long as a sample of the ceilings
constexpr size_t kLeastRounds = 5;
constexpr int kSampledRows = 6;
// Far above what rounding the inputs costs (fp8: 2^-4 per element, averaged out), far below a bug.
constexpr double kWrong = 0.1;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Normal values, repeated with a period that shares no factor with any stride.
class NoiseTable {
 public:
  NoiseTable() : values_((1 << 20) + 7) {
    std::mt19937 generator(20261121);
    std::normal_distribution<float> normal;
    for (float& value : values_) value = normal(generator);
  }
  void fill(std::vector<float>& out) {
    for (float& value : out) {
      value = values_[next_];
      if (++next_ == values_.size()) next_ = 0;
    }
  }

 private:
  std::vector<float> values_;
  size_t next_ = 0;
};

// Activations of a dtype, made from f32 values; bf16 only besides f32, as the models have it.
std::vector<std::byte> as_dtype(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
  if (dtype == DType::f32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], 4);
    const auto upper = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    std::memcpy(bytes.data() + 2 * i, &upper, 2);
  }
  return bytes;
}

float element(const std::vector<std::byte>& bytes, DType dtype, size_t index) {
  float value;
  if (dtype == DType::f32) {
    std::memcpy(&value, bytes.data() + 4 * index, 4);
    return value;
  }
  uint16_t upper;
  std::memcpy(&upper, bytes.data() + 2 * index, 2);
  const uint32_t bits = static_cast<uint32_t>(upper) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// One case set up: caches filled, one batch to time.
class Workload {
 public:
  Workload(const AttentionCase& config, ThreadPool& threads, const std::string& wish);

  void plan() { backend_->plan(batch_); }
  void forward(int32_t layer) {
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
  double error() const;
  int32_t layers() const { return layers_; }
  const std::string& backend() const { return name_; }

 private:
  size_t row_elements() const { return static_cast<size_t>(config_.kv_heads) * config_.head_dim; }
  // Rows of k_ and v_: the cached tokens of all requests, then the new ones.
  int32_t prefix() const { return config_.kv_len - config_.q_len; }
  size_t new_row(size_t token) const {
    return static_cast<size_t>(config_.batch) * prefix() + token;
  }
  size_t row_of(int32_t request, int32_t token) const {
    return token < prefix()
               ? static_cast<size_t>(request) * prefix() + token
               : new_row(static_cast<size_t>(request) * config_.q_len + token - prefix());
  }
  void place_requests();
  void fill_cache(ThreadPool& threads);
  double row_error(int32_t request, int32_t row, int32_t head, double& norm) const;

  AttentionCase config_;
  std::string name_;
  int32_t layers_ = 1;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  std::vector<int32_t> request_slots_, request_rows_, kv_lens_, q_indptr_;
  std::vector<int64_t> out_slots_;
  std::vector<std::byte> q_, k_, v_, out_;
  BatchView batch_;
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
  std::vector<float> values(static_cast<size_t>(config.batch) * config.kv_len * row_elements());
  noise.fill(values);
  k_ = as_dtype(values, config.q_dtype);
  noise.fill(values);
  v_ = as_dtype(values, config.q_dtype);
  values.resize(static_cast<size_t>(config.batch) * config.q_len * config.q_heads *
                config.head_dim);
  noise.fill(values);
  q_ = as_dtype(values, config.q_dtype);
  out_.assign(q_.size(), std::byte{0xff});
  if (prefix() > 0) fill_cache(threads);
}

// Pages in random order, as a pool looks after hours of service.
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
  batch_.max_q_len = config_.q_len;
  batch_.max_kv_len = config_.kv_len;
  batch_.q_indptr = q_indptr_.data();
  batch_.kv_lens = kv_lens_.data();
  batch_.request_rows = request_rows_.data();
  batch_.request_slots = request_slots_.data();
  batch_.request_slots_stride = config_.kv_len;
  batch_.out_slots = out_slots_.data();
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
  double most = -1e300;
  for (int32_t t = 0; t < visible; ++t) {
    double dot = 0;
    for (size_t d = 0; d < dim; ++d) {
      dot += static_cast<double>(element(q_, config_.q_dtype, q_at + d)) *
             element(k_, config_.q_dtype, kv_at(t) + d);
    }
    weights[static_cast<size_t>(t)] = dot / std::sqrt(static_cast<double>(dim));
    most = std::max(most, weights[static_cast<size_t>(t)]);
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - most);
  double squared_error = 0;
  for (size_t d = 0; d < dim; ++d) {
    double expected = 0;
    for (int32_t t = 0; t < visible; ++t) {
      expected +=
          weights[static_cast<size_t>(t)] / sum * element(v_, config_.q_dtype, kv_at(t) + d);
    }
    const double difference = element(out_, config_.q_dtype, q_at + d) - expected;
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

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Rounds of calls between samples of the ceilings.
void measure(Workload& workload, CeilingProbe& probe, double seconds, AttentionResult& result) {
  std::vector<double> times, flops, read_bytes, compute, memory;
  Ceilings before = probe.sample();
  int32_t layer = 0;
  for (const double end = now() + seconds; now() < end || memory.size() < kLeastRounds;) {
    std::vector<double> round;
    for (const double round_end = now() + kRoundSeconds; round.empty() || now() < round_end;) {
      layer = (layer + 1) % workload.layers();
      const double start = now();
      workload.forward(layer);
      round.push_back(now() - start);
    }
    const Ceilings after = probe.sample();
    flops.push_back((before.flops + after.flops) / 2);
    read_bytes.push_back((before.read_bytes + after.read_bytes) / 2);
    before = after;
    compute.push_back(result.config.flops() / flops.back() / median(round));
    memory.push_back(result.config.bytes() / read_bytes.back() / median(round));
    times.insert(times.end(), round.begin(), round.end());
  }
  result.seconds = median(times);
  result.seconds_min = *std::min_element(times.begin(), times.end());
  result.compute_bound = median(compute) > median(memory);
  result.fraction = median(result.compute_bound ? compute : memory);
  result.ceilings = {median(flops), median(read_bytes)};
}

}  // namespace

double AttentionCase::flops() const {
  const double prefix = kv_len - q_len;
  const double pairs = q_len * prefix + 0.5 * q_len * (q_len + 1.0);
  return 4.0 * head_dim * pairs * q_heads * batch;
}

double AttentionCase::bytes() const {
  const double kv =
      2.0 * batch * kv_len * kv_heads * head_dim * static_cast<double>(dtype_bytes(kv_dtype));
  const double qo =
      2.0 * batch * q_len * q_heads * head_dim * static_cast<double>(dtype_bytes(q_dtype));
  return kv + qo;
}

std::vector<AttentionCase> default_cases(bool quick) {
  std::vector<AttentionCase> cases;
  for (const int32_t dim : {64, 128}) {
    for (const int32_t length : {1024, 2048, 4096, 8192}) {
      if (quick && length > 1024) continue;
      AttentionCase prefill;
      prefill.phase = "prefill";
      prefill.head_dim = dim;
      prefill.q_len = prefill.kv_len = length;
      cases.push_back(prefill);
    }
  }
  for (const DType kv_dtype : {DType::f32, DType::bf16, DType::f8e4m3}) {
    for (const int32_t batch : {1, 8, 32}) {
      for (const int32_t length : {1024, 4096, 16384}) {
        if (quick && (batch > 1 || length > 4096)) continue;
        AttentionCase decode;
        decode.phase = "decode";
        decode.batch = batch;
        decode.kv_len = length;
        decode.kv_dtype = kv_dtype;
        // A bf16 model keeps bf16 activations; fp8 caches serve either.
        if (kv_dtype == DType::bf16) decode.q_dtype = DType::bf16;
        cases.push_back(decode);
      }
    }
  }
  return cases;
}

AttentionResult run_attention_case(const AttentionCase& config, CeilingProbe& probe,
                                   ThreadPool& threads, const AttentionBenchOptions& options) {
  if (options.progress) {
    options.progress(fmt::format("{} batch {} q {} kv {} dim {} {}", config.phase, config.batch,
                                 config.q_len, config.kv_len, config.head_dim,
                                 dtype_name(config.kv_dtype)));
  }
  Workload workload(config, threads, options.backend);
  AttentionResult result;
  result.config = config;
  result.backend = workload.backend();
  result.threads = threads.size();
  const double plan_start = now();
  workload.plan();
  result.plan_seconds = now() - plan_start;
  workload.forward(0);
  result.error = workload.error();
  if (!(result.error < kWrong)) {
    throw std::runtime_error(
        fmt::format("backend {}: wrong output, relative error {}", result.backend, result.error));
  }
  measure(workload, probe, options.seconds_per_case, result);
  return result;
}

}  // namespace fovea::bench
