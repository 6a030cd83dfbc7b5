// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_decoder_layers.h"

#include <cmath>
#include <memory>
#include <span>

#include "bench/gpu_ceilings.h"
#include "bench/rank_timing.h"
#include "core/check.h"
#include "fovea/error.h"
#include "model/cuda_device.h"

namespace fovea::bench {
namespace {

constexpr int32_t kHidden = 4096, kQ = 4096, kKv = 1024, kWidth = 12288;
constexpr int32_t kQkv = kQ + 2 * kKv;
constexpr int kLayers = 4;  // whose weights exceed the L2 cache
constexpr int32_t kMaxRows = 64;
constexpr float kEpsilon = 1e-6f;
constexpr size_t kElement = sizeof(uint16_t);

size_t index(int64_t i) { return static_cast<size_t>(i); }

// A part of a matrix [n, k].
struct Part {
  int32_t first_row = 0, rows = 0, first_column = 0, columns = 0;
};

// A matrix in memory of its own.
class Matrix {
 public:
  Matrix(int32_t n, int32_t k) : n_(n), k_(k), values_(index(n) * index(k) * kElement) {}

  // Fills rows from `row` on with a part of `whole`, whose rows have `stride` elements.
  void take(int32_t row, const gpu::DeviceBuffer& whole, int32_t stride, const Part& part) const {
    const size_t from = index(part.first_row) * index(stride) + index(part.first_column);
    gpu::copy_rows_on_device(values_.data<uint16_t>() + index(row) * index(k_),
                             whole.data<uint16_t>() + from,
                             {index(stride) * kElement, index(k_) * kElement},
                             index(part.columns) * kElement, index(part.rows), nullptr);
  }
  Linear linear() const {
    return {
        .weight = values_.data<std::byte>(), .dtype = DType::bf16, .n = n_, .k = k_, .stride = k_};
  }

 private:
  int32_t n_, k_;
  gpu::DeviceBuffer values_;
};

// Layers of one rank of `ranks`, or of one GPU alone. Attention is replaced by its queries.
class Layers {
 public:
  Layers(std::unique_ptr<ModelDevice> device, int rank, int ranks, MeasureKernels& kernels)
      : device_(std::move(device)),
        q_(kQ / ranks),
        qkv_(kQkv / ranks),
        width_(kWidth / ranks),
        x_(index(kMaxRows) * kHidden * sizeof(float)),
        branch_(x_.bytes()),
        squares_(index(kMaxRows * sums_of_squares(kHidden)) * sizeof(float)),
        normed_(index(kMaxRows) * kHidden * kElement),
        heads_(index(kMaxRows) * index(qkv_) * kElement),
        hidden_(index(kMaxRows) * index(width_) * kElement) {
    norm_ = {device_->place(std::vector<float>(kHidden, 1.0f)), kEpsilon, false};
    for (int layer = 0; layer < kLayers; ++layer) add_layer(layer, rank, kernels);
  }

  ModelDevice& device() { return *device_; }
  const gpu::DeviceBuffer& x() const { return x_; }
  void fill_x(MeasureKernels& kernels) const {
    kernels.fill_noise(x_.data(), DType::f32, int64_t{kMaxRows} * kHidden, 99, 1, 0, nullptr);
    gpu::synchronize(nullptr);
  }

  void run(int64_t rows) {
    device_->residual(step(rows, false));
    for (size_t layer = 0; layer < index(kLayers); ++layer) {
      if (device_->ranks() == nullptr) {
        run_joined(layer, rows);
      } else {
        run_part(layer, rows);
      }
    }
  }

 private:
  void add_layer(int layer, int rank, MeasureKernels& kernels) {
    const auto seed = static_cast<uint32_t>(layer * 10);
    const auto whole = [&](uint32_t number, int32_t n, int32_t k) {
      gpu::DeviceBuffer values(index(n) * index(k) * kElement);
      kernels.fill_noise(values.data(), DType::bf16, int64_t{n} * k, seed + number,
                         1 / std::sqrt(static_cast<float>(k)), 0, nullptr);
      return values;
    };
    const int32_t kv = qkv_ - q_;
    const auto qkv = whole(1, kQkv, kHidden), o = whole(2, kHidden, kQ),
               gates = whole(3, 2 * kWidth, kHidden), down = whole(4, kHidden, kWidth);
    qkv_parts_.emplace_back(qkv_, kHidden).take(0, qkv, kHidden, {rank * q_, q_, 0, kHidden});
    qkv_parts_.back().take(q_, qkv, kHidden, {kQ + rank * kv, kv, 0, kHidden});
    o_parts_.emplace_back(kHidden, q_).take(0, o, kQ, {0, kHidden, rank * q_, q_});
    gate_parts_.emplace_back(2 * width_, kHidden)
        .take(0, gates, kHidden, {rank * width_, width_, 0, kHidden});
    gate_parts_.back().take(width_, gates, kHidden, {kWidth + rank * width_, width_, 0, kHidden});
    down_parts_.emplace_back(kHidden, width_)
        .take(0, down, kWidth, {0, kHidden, rank * width_, width_});
    gpu::synchronize(nullptr);
  }

  ResidualStep step(int64_t rows, bool with_branch) const {
    ResidualStep step;
    step.x = x_.data<float>();
    if (with_branch) step.branch = branch_.data<float>();
    step.is_part = true;
    step.norm = norm_;
    step.normed = normed();
    step.rows = rows;
    step.dim = kHidden;
    return step;
  }
  Rows normed() const { return {normed_.data(), kHidden, DType::bf16}; }
  Rows heads() const { return {heads_.data(), qkv_, DType::bf16}; }
  Rows hidden() const { return {hidden_.data(), width_, DType::bf16}; }
  Rows branch() const { return {branch_.data(), kHidden, DType::f32}; }
  MlpParts mlp(size_t layer) const {
    return {.gate = gate_parts_[layer].linear(), .down = down_parts_[layer].linear()};
  }

  // As DecoderModel does on one GPU.
  void run_joined(size_t layer, int64_t rows) {
    const DeferredNorm before{squares_.data<float>(), kEpsilon};
    const JoinedSteps after{.after = step(rows, false), .squares = squares_.data<float>()};
    const DeferredNorm first = layer == 0 ? DeferredNorm{} : before;
    const Linear qkv = qkv_parts_[layer].linear(), o = o_parts_[layer].linear();
    const MlpParts parts = mlp(layer);
    const bool joined = device_->joined_linear(qkv, {.before = first}, normed(), heads(), rows) &&
                        device_->joined_linear(o, after, heads(), {}, rows) &&
                        device_->gated_linear(parts, before, normed(), hidden(), rows) &&
                        device_->joined_linear(parts.down, after, hidden(), {}, rows);
    if (!joined) fail(ErrorCode::unsupported, "{} rows join no norms", rows);
  }

  // As DecoderModel does on a rank.
  void run_part(size_t layer, int64_t rows) {
    device_->linear(qkv_parts_[layer].linear(), normed(), heads(), rows);
    device_->part_linear(o_parts_[layer].linear(), heads(), branch(), rows);
    device_->residual(step(rows, true));
    if (!device_->gated_linear(mlp(layer), {}, normed(), hidden(), rows)) {
      fail(ErrorCode::unsupported, "{} rows have no product with gates", rows);
    }
    device_->part_linear(down_parts_[layer].linear(), hidden(), branch(), rows);
    device_->residual(step(rows, true));
  }

  std::unique_ptr<ModelDevice> device_;
  int32_t q_, qkv_, width_;
  Norm norm_;
  std::vector<Matrix> qkv_parts_, o_parts_, gate_parts_, down_parts_;
  gpu::DeviceBuffer x_, branch_, squares_, normed_, heads_, hidden_;
};

// Largest difference of the first rows relative to their root mean square.
double worst_difference(const gpu::DeviceBuffer& one, const gpu::DeviceBuffer& other,
                        int64_t rows) {
  std::vector<float> a(index(rows) * kHidden), b(a.size());
  gpu::copy_to_host(a.data(), one.data(), a.size() * sizeof(float), nullptr);
  gpu::copy_to_host(b.data(), other.data(), b.size() * sizeof(float), nullptr);
  gpu::synchronize(nullptr);
  double squares = 0, worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(double{a[i]} - b[i]);
    squares += double{a[i]} * a[i];
    if (!(difference <= worst)) worst = difference;  // NaN, too
  }
  return worst / std::sqrt(squares / static_cast<double>(a.size()));
}

}  // namespace

std::vector<DecoderLayerTime> measure_decoder_layers(const ModelRanks& links, int gpu) {
  constexpr double kTolerance = 0.1;
  const gpu::Context context(gpu);
  MeasureKernels kernels(context);
  Layers one(make_cuda_device({.index = gpu, .max_rows = kMaxRows}), 0, 1, kernels);
  Layers part(make_cuda_device({.index = gpu, .max_rows = kMaxRows, .ranks = links}),
              links.communicator->rank(), links.communicator->size(), kernels);
  std::vector<DecoderLayerTime> times;
  for (const int32_t rows : {1, 8, 16, 64}) {
    DecoderLayerTime time{.rows = rows};
    for (Layers* layers : {&one, &part}) {
      layers->device().bind();
      layers->fill_x(kernels);
      links.host->barrier();
      layers->run(rows);
      gpu::synchronize(layers->device().stream());
      links.host->barrier();
    }
    time.worst = worst_difference(one.x(), part.x(), rows);
    time.one = time_calls(*links.host, one.device().stream(), [&] { one.run(rows); }) / kLayers;
    time.ranks = time_calls(*links.host, part.device().stream(), [&] { part.run(rows); }) / kLayers;
    if (!(time.worst <= kTolerance)) {
      fail(ErrorCode::device_failure, "{} rows of layers over ranks differ from one GPU's by {}",
           rows, time.worst);
    }
    times.push_back(time);
  }
  links.host->barrier();  // nobody frees while others run
  return times;
}

}  // namespace fovea::bench
