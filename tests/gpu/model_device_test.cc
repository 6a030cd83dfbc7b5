// SPDX-License-Identifier: Apache-2.0
// Every operation of a model's layers on a GPU against the CPU's, on the same inputs, all of which
// bf16 can hold. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "core/float_types.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "gpu/cublaslt.h"
#include "gpu/gpu.h"
#include "model/cuda_device.h"
#include "model/layers.h"
#include "support/error_budget.h"

namespace fovea {
namespace {

constexpr int32_t kMaxRows = 256;

// The same memory on one device, with what a test needs to fill and read it.
class Side {
 public:
  explicit Side(std::shared_ptr<ModelDevice> device) : device_(std::move(device)) {}
  ModelDevice& operator*() const { return *device_; }
  ModelDevice* operator->() const { return device_.get(); }

  Rows rows(const std::vector<float>& values, int64_t width, DType dtype) {
    std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      store_float(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
    }
    return {upload(bytes.data(), bytes.size()), width, dtype};
  }
  Rows activations(const std::vector<float>& values, int64_t width) {
    return rows(values, width, device_->activation_dtype());
  }
  Rows floats(const std::vector<float>& values, int64_t width) {
    return rows(values, width, DType::f32);
  }
  int32_t* ints(const std::vector<int32_t>& values) {
    return static_cast<int32_t*>(upload(values.data(), values.size() * sizeof(int32_t)));
  }
  void* upload(const void* from, size_t bytes) {
    memory_.push_back(device_->allocate(bytes));
    if (device_->kind() == DeviceKind::cpu) {
      std::memcpy(memory_.back().get(), from, bytes);
    } else {
      gpu::copy_to_device(memory_.back().get(), from, bytes, device_->stream());
      gpu::synchronize(device_->stream());
    }
    return memory_.back().get();
  }
  template <typename T>
  std::vector<T> read(const void* from, size_t count) {
    std::vector<T> values(count);
    if (device_->kind() == DeviceKind::cpu) {
      std::memcpy(values.data(), from, count * sizeof(T));
    } else {
      gpu::copy_to_host(values.data(), from, count * sizeof(T), device_->stream());
      gpu::synchronize(device_->stream());
    }
    return values;
  }
  std::vector<float> read(Rows rows, size_t count) {
    const std::vector<std::byte> bytes =
        read<std::byte>(rows.data, count * dtype_bytes(rows.dtype));
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) {
      values[i] = load_float(bytes.data(), rows.dtype, static_cast<int64_t>(i));
    }
    return values;
  }
  const StoredTensor& tensor(const std::vector<float>& values) {
    std::vector<uint16_t>& bits = stored_.emplace_back();
    for (const float value : values) bits.push_back(float_to_bf16(value));
    StoredTensor& tensor = tensors_.emplace_back();
    tensor.dtype = DType::bf16;
    tensor.data = reinterpret_cast<const std::byte*>(bits.data());
    tensor.bytes = bits.size() * 2;
    return tensor;
  }
  Linear linear(const std::vector<float>& weight, int32_t n, int32_t k, bool is_kn,
                const std::vector<float>& bias = {}) {
    Linear linear;
    linear.weight = device_->place(tensor(weight), "weight");
    linear.dtype = DType::bf16;
    linear.n = n;
    linear.k = k;
    linear.stride = is_kn ? n : k;
    linear.is_kn = is_kn;
    if (!bias.empty()) linear.bias = device_->place(bias).data();
    return linear;
  }

 private:
  std::shared_ptr<ModelDevice> device_;
  std::deque<std::shared_ptr<std::byte>> memory_;
  std::deque<std::vector<uint16_t>> stored_;
  std::deque<StoredTensor> tensors_;
};

class ModelDevices : public testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
    ASSERT_EQ(gpu::why_no_cublaslt(), "");
  }

  std::vector<float> random(size_t count, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(count);
    for (float& value : values) value = bf16_to_float(float_to_bf16(normal(random_)));
    return values;
  }
  std::vector<int32_t> random_ints(size_t count, int32_t end) {
    std::vector<int32_t> values(count);
    for (int32_t& value : values)
      value = static_cast<int32_t>(random_() % static_cast<uint32_t>(end));
    return values;
  }

  // body(side) computes on one device and returns its rows.
  template <typename Body>
  void expect_same(DType out, size_t width, const Body& body, const std::string& what) {
    expect_same(out == DType::f32 ? test::kLayerOpF32Budget : test::kLayerOpBf16Budget, width, body,
                what);
  }
  template <typename Body>
  void expect_same(const test::ErrorBudget& budget, size_t width, const Body& body,
                   const std::string& what) {
    const std::vector<float> want = body(host()), got = body(cuda());
    ASSERT_EQ(want.size(), got.size());
    for (size_t row = 0; row < want.size(); row += width) {
      float most = 0;
      for (size_t i = row; i < row + width; ++i) most = std::max(most, std::fabs(want[i]));
      for (size_t i = row; i < row + width; ++i) {
        ASSERT_LE(std::fabs(got[i] - want[i]), budget.units * budget.unit * most)
            << what << ": row " << row / width << ", column " << i - row << ": " << got[i]
            << ", want " << want[i];
      }
    }
  }

  Side& host() {
    if (!host_) host_.emplace(make_host_device(threads_));
    return *host_;
  }
  Side& cuda() {
    if (!cuda_) cuda_.emplace(make_cuda_device({.max_rows = kMaxRows}));
    return *cuda_;
  }

  std::mt19937 random_{7};
  ThreadPool threads_{2};
  std::optional<Side> host_, cuda_;
};

TEST_F(ModelDevices, MultiplyAlike) {
  struct Shape {
    int32_t rows, n, k;
    bool is_kn, bias;
    DType out;
  };
  for (const Shape& s :
       {Shape{1, 2048, 128, false, false, DType::f32}, Shape{7, 4, 128, false, true, DType::f32},
        Shape{33, 256, 352, true, true, DType::f32},
        Shape{256, 704, 256, false, false, DType::bf16},
        Shape{5, 512, 1024, false, true, DType::bf16},
        Shape{64, 8, 64, true, false, DType::bf16}}) {
    const std::vector<float> x = random(static_cast<size_t>(s.rows) * s.k);
    const std::vector<float> w = random(static_cast<size_t>(s.n) * s.k, 0.1f);
    const std::vector<float> bias = s.bias ? random(s.n) : std::vector<float>();
    const auto count = static_cast<size_t>(s.rows) * s.n;
    expect_same(
        s.out, s.n,
        [&](Side& side) {
          const bool host = side->kind() == DeviceKind::cpu;
          const Rows out = side.rows(std::vector<float>(count), s.n, host ? DType::f32 : s.out);
          side->linear(side.linear(w, s.n, s.k, s.is_kn, bias), side.activations(x, s.k), out,
                       s.rows);
          return side.read(out, count);
        },
        "n " + std::to_string(s.n));
  }
}

TEST_F(ModelDevices, MultiplyRowsAloneOrTogetherAlike) {
  constexpr int32_t kN = 1024, kK = 512;
  const std::vector<float> x = random(size_t{kMaxRows} * kK), w = random(size_t{kN} * kK, 0.1f);
  Side invariant(make_cuda_device({.max_rows = kMaxRows, .row_invariant = true}));
  const Linear weights = invariant.linear(w, kN, kK, false);
  const Rows in = invariant.activations(x, kK);
  const Rows out = invariant.floats(std::vector<float>(size_t{kMaxRows} * kN), kN);
  invariant->linear(weights, in, out, kMaxRows);
  const std::vector<float> together = invariant.read(out, size_t{kMaxRows} * kN);
  for (const int32_t rows : {1, 2, 3, 17, 64, 200}) {
    invariant->linear(weights, in, out, rows);
    const std::vector<float> some = invariant.read(out, static_cast<size_t>(rows) * kN);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), together.begin())) << rows << " rows";
  }
}

TEST_F(ModelDevices, StepTheResidualAlike) {
  for (const int32_t dim : {128, 1000}) {
    constexpr int32_t kRows = 9;
    const size_t count = static_cast<size_t>(kRows) * dim;
    const std::vector<float> x = random(count, 3), branch = random(count);
    const std::vector<float> in = random(dim), out = random(dim, 0.1f);
    for (const bool has_branch_norm : {false, true}) {
      for (const bool reads_x : {false, true}) {
        expect_same(
            reads_x ? DType::f32 : DType::bf16, dim,
            [&](Side& side) {
              ResidualStep step;
              step.x = side.floats(x, dim).floats();
              step.branch = side.floats(branch, dim).floats();
              if (has_branch_norm) step.branch_norm = {side->place(out), 1e-6f, true};
              step.norm = {side->place(in), 1e-5f, false};
              step.normed = side.activations(std::vector<float>(count), dim);
              step.rows = kRows;
              step.dim = dim;
              side->residual(step);
              return side.read(reads_x ? Rows{step.x, dim, DType::f32} : step.normed, count);
            },
            "dim " + std::to_string(dim));
      }
    }
  }
}

TEST_F(ModelDevices, PrepareHeadsAlike) {
  constexpr int32_t kRows = 11, kHeads = 3, kPositions = 600;
  for (const int32_t dim : {64, 256}) {
    kernels::RopeSpec spec;
    spec.rotary_dim = dim == 64 ? 64 : 128;
    const std::vector<float> x = random(size_t{kRows} * kHeads * dim), norm = random(dim);
    const std::vector<int32_t> positions = random_ints(kRows, kPositions);
    for (int which = 0; which < 5; ++which) {
      expect_same(
          DType::bf16, dim,
          [&](Side& side) {
            HeadSteps steps;
            if (which == 0 || which == 1) steps.norm = {side->place(norm), 1e-6f, which == 1};
            if (which >= 1 && which <= 3) {
              kernels::RopeTable table = make_rope_table(spec, kPositions);
              steps.rotary.table = table.view();
              steps.rotary.table.cos = side->place(table.cos).data();
              steps.rotary.table.sin = side->place(table.sin).data();
              steps.rotary.layout =
                  which == 3 ? kernels::RopeLayout::interleaved : kernels::RopeLayout::half_split;
            }
            if (which == 3) steps.l2_epsilon = 1e-5f;
            if (which == 4) steps.scale = {.factor = 0.1f, .floor_scale = 128};
            const Rows rows = side.activations(x, kHeads * dim);
            side->prepare_heads(steps, as_heads(rows, dim), kRows, kHeads, dim,
                                side.ints(positions));
            return side.read(rows, x.size());
          },
          "steps " + std::to_string(which) + ", dim " + std::to_string(dim));
    }
  }
}

TEST_F(ModelDevices, ActivateAndGateAlike) {
  constexpr int32_t kRows = 13, kWidth = 72;
  const std::vector<float> in = random(size_t{kRows} * 2 * kWidth, 6);
  for (const kernels::Activation activation :
       {kernels::Activation::silu, kernels::Activation::gelu_tanh,
        kernels::Activation::clamped_swiglu}) {
    for (const bool alternates : {false, true}) {
      expect_same(
          DType::bf16, kWidth,
          [&](Side& side) {
            MlpParts parts;
            parts.down.k = kWidth;
            parts.activation = activation;
            parts.alternates = alternates;
            const Rows out = side.activations(std::vector<float>(in.size() / 2), kWidth);
            side->gated_activation(parts, side.activations(in, 2 * kWidth), out, kRows);
            return side.read(out, in.size() / 2);
          },
          "activation " + std::to_string(static_cast<int>(activation)));
    }
  }
  for (const int32_t gate_dim : {1, kWidth}) {
    expect_same(
        DType::bf16, kWidth,
        [&](Side& side) {
          const Rows rows = side.activations(in, 2 * kWidth);
          const HeadRows heads = as_heads(rows, 2 * kWidth);
          side->sigmoid_gate(heads, from_dim(heads, kWidth), kRows, 1, kWidth, gate_dim);
          std::vector<float> all = side.read(rows, in.size()), some;
          for (size_t row = 0; row < kRows; ++row) {
            some.insert(some.end(), all.begin() + row * 2 * kWidth,
                        all.begin() + row * 2 * kWidth + kWidth);
          }
          return some;
        },
        "gate_dim " + std::to_string(gate_dim));
  }
}

TEST_F(ModelDevices, GatherAndCapAlike) {
  constexpr int32_t kTable = 50, kDim = 120, kRows = 31;
  const std::vector<float> table = random(size_t{kTable} * kDim, 20);
  const std::vector<int32_t> ids = random_ints(kRows, kTable);
  for (const bool embeds : {false, true}) {
    expect_same(
        DType::f32, kDim,
        [&](Side& side) {
          const Rows out = side.floats(std::vector<float>(size_t{kRows} * kDim), kDim);
          if (embeds) {
            kernels::EmbeddingParams params;
            params.table = side->place(side.tensor(table), "embedding");
            params.dtype = DType::bf16;
            params.table_rows = kTable;
            params.ids = side.ints(ids);
            params.out = out.floats();
            params.rows = kRows;
            params.dim = kDim;
            params.factor = 11.25f;
            side->embedding(params);
          } else {
            kernels::ExpertRowsParams params;
            params.x = side.floats(table, kDim).floats();
            params.out = out.floats();
            params.x_stride = params.out_stride = kDim;
            params.index = side.ints(ids);
            params.rows = kRows;
            params.dim = kDim;
            side->gather_rows(params);
          }
          side->soft_cap(out.floats(), 30, int64_t{kRows} * kDim);
          return side.read(out, size_t{kRows} * kDim);
        },
        embeds ? "embedding" : "gather");
  }
}

struct Routing {
  kernels::MoeScore score;
  int32_t experts, top_k, groups = 1, top_groups = 1;
  bool normalise = false;
};
const Routing kRoutings[] = {{kernels::MoeScore::softmax, 60, 4, 1, 1, true},
                             {kernels::MoeScore::topk_softmax, 4, 2},
                             {kernels::MoeScore::sigmoid, 16, 1},
                             {kernels::MoeScore::grouped_sigmoid, 64, 6, 8, 3, true}};

TEST_F(ModelDevices, RouteAlike) {
  constexpr int32_t kRows = 40;
  for (const Routing& routing : kRoutings) {
    std::vector<float> logits = random(static_cast<size_t>(kRows) * routing.experts);
    logits[3] = logits[2] = logits[1];  // equal scores: the lower expert goes first
    const std::vector<float> bias = random(routing.experts, 0.1f);
    const auto choices = static_cast<size_t>(kRows) * routing.top_k;
    std::vector<int32_t> ids[2];
    expect_same(
        DType::f32, routing.top_k,
        [&](Side& side) {
          kernels::MoeRoutingParams params;
          params.score = routing.score;
          params.logits = side.floats(logits, routing.experts).floats();
          params.rows = kRows;
          params.experts = routing.experts;
          params.top_k = routing.top_k;
          params.normalise = routing.normalise;
          params.factor = 2.5f;
          params.bias = side->place(bias).data();
          params.groups = routing.groups;
          params.top_groups = routing.top_groups;
          params.ids = side.ints(std::vector<int32_t>(choices));
          params.weights = side.floats(std::vector<float>(choices), routing.top_k).floats();
          side->moe_routing(params);
          ids[side->kind() == DeviceKind::cuda] = side.read<int32_t>(params.ids, choices);
          return side.read<float>(params.weights, choices);
        },
        "score " + std::to_string(static_cast<int>(routing.score)));
    EXPECT_EQ(ids[0], ids[1]);
  }
}

TEST_F(ModelDevices, RunExpertsAlike) {
  constexpr int32_t kHidden = 136, kWidth = 72, kExperts = 5;
  for (int which = 0; which < 6; ++which) {
    const bool is_kn = which % 2 == 0, alternates = which == 2, separate = which == 3;
    const bool scales_input = which == 4;
    const int32_t rows = which == 5 ? 200 : 19, top_k = which == 4 ? 1 : 2;
    std::vector<std::vector<float>> gate, up, down, gate_bias, down_bias;
    for (int32_t e = 0; e < kExperts; ++e) {
      const int32_t gate_width = separate ? kWidth : 2 * kWidth;
      gate.push_back(random(static_cast<size_t>(gate_width) * kHidden, 0.1f));
      up.push_back(random(size_t{kWidth} * kHidden, 0.1f));
      down.push_back(random(size_t{kHidden} * kWidth, 0.1f));
      gate_bias.push_back(alternates ? random(gate_width) : std::vector<float>());
      down_bias.push_back(alternates ? random(kHidden) : std::vector<float>());
    }
    const std::vector<float> x = random(static_cast<size_t>(rows) * kHidden);
    const std::vector<float> before = random(x.size());
    const std::vector<float> weights = random(static_cast<size_t>(rows) * top_k);
    std::vector<int32_t> ids;
    for (int32_t row = 0; row < rows; ++row) {
      // Expert 1 gets nothing, so that an empty one is met.
      const int32_t first = random_ints(1, kExperts)[0];
      ids.push_back(first == 1 ? 2 : first);
      if (top_k == 2) ids.push_back(ids.back() == 4 ? 0 : 4);
    }
    expect_same(
        test::kExpertsBudget, kHidden,
        [&](Side& side) {
          std::vector<MlpParts> experts;
          for (size_t e = 0; e < kExperts; ++e) {
            MlpParts& parts = experts.emplace_back();
            parts.gate =
                side.linear(gate[e], separate ? kWidth : 2 * kWidth, kHidden, is_kn, gate_bias[e]);
            if (separate) parts.up = side.linear(up[e], kWidth, kHidden, is_kn);
            parts.down = side.linear(down[e], kHidden, kWidth, is_kn, down_bias[e]);
            parts.alternates = alternates;
            if (alternates) parts.activation = kernels::Activation::clamped_swiglu;
          }
          const std::unique_ptr<Experts> placed = side->place(std::move(experts), scales_input);
          const size_t bytes = placed->scratch_bytes(rows, top_k);
          const std::shared_ptr<std::byte> scratch = side->allocate(bytes);
          const Rows out = side.floats(before, kHidden);
          placed->add({side.ints(ids), side.floats(weights, top_k).floats(), top_k},
                      side.activations(x, kHidden), out, rows, scratch.get());
          return side.read(out, x.size());
        },
        "experts " + std::to_string(which));
  }
}

TEST_F(ModelDevices, RefuseWhatTheGpuDoesNotMultiply) {
  StoredTensor tensor;
  tensor.dtype = DType::f32;
  try {
    cuda()->place(tensor, "lm_head.weight");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'lm_head.weight' is fp32"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace fovea
