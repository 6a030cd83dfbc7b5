// SPDX-License-Identifier: Apache-2.0
// Registers a custom backend without changes to the library: simple attention for fp32 decoder
// layers. AUTO selects it where it applies; elsewhere, explain() reports why not.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <vector>

#include "fovea/error.h"
#include "fovea/kv_cache.h"
#include "fovea/select_backend.h"

namespace {

using namespace fovea;

class PlainAttention final : public AttentionBackend {
 public:
  explicit PlainAttention(const BackendContext& context)
      : spec_(context.spec), pool_(*context.kv) {}

  std::string_view name() const override { return "plain"; }

  static size_t bytes(const BatchLimits& limits) {
    return static_cast<size_t>(limits.max_kv_len) * sizeof(float);
  }
  size_t workspace_bytes(const BatchLimits& limits) const override { return bytes(limits); }

  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    if (workspace.empty()) {
      own_.resize(bytes(limits));
      workspace = own_;
    }
    if (workspace.size() < bytes(limits)) {
      throw Error(ErrorCode::workspace_too_small,
                  "plain needs " + std::to_string(bytes(limits)) + " bytes");
    }
    scores_ = reinterpret_cast<float*>(workspace.data());
  }

  void plan(const BatchView& batch, Stream) override { batch_ = batch; }

  void forward(const LayerTensors& layer, Stream) override {
    const KvLayerView cache = pool_.layer(layer.layer);
    if (layer.save_kv && layer.k) store(layer, cache);
    if (!layer.q) return;  // the call only stores keys and values
    for (int32_t request = 0; request < batch_.requests; ++request) {
      for (int32_t row = batch_.q_indptr[request]; row < batch_.q_indptr[request + 1]; ++row) {
        const int32_t keys =
            batch_.kv_lens[request] - (batch_.q_indptr[request + 1] - row) + 1;  // causal
        for (int32_t head = 0; head < spec_.q_heads; ++head) {
          attend(layer, cache, {request, row, head, std::max(keys, 0)});
        }
      }
    }
  }

 private:
  struct Row {
    int32_t request, row, head, keys;
  };

  void store(const LayerTensors& layer, const KvLayerView& cache) {
    for (int32_t token = 0; token < batch_.tokens; ++token) {
      if (batch_.out_slots[token] < 0) continue;
      for (int32_t head = 0; head < spec_.kv_heads; ++head) {
        std::copy_n(row_address(layer.k, token, head), spec_.head_dim * sizeof(float),
                    k_address(cache, batch_.out_slots[token], head));
        std::copy_n(row_address(layer.v, token, head), spec_.head_dim_v * sizeof(float),
                    v_address(cache, batch_.out_slots[token], head));
      }
    }
  }

  void attend(const LayerTensors& layer, const KvLayerView& cache, const Row& at) {
    const int32_t kv_head = at.head / (spec_.q_heads / spec_.kv_heads);
    const TokenTable& table = key_table(batch_, spec_.scope);
    const int32_t table_row = batch_.request_rows[at.request];
    const auto* q = reinterpret_cast<const float*>(row_address(layer.q, at.row, at.head));
    float largest = -INFINITY, sum = 0;
    for (int32_t key = 0; key < at.keys; ++key) {
      const auto* k =
          reinterpret_cast<const float*>(k_address(cache, table.slot(table_row, key), kv_head));
      float score = 0;
      for (int32_t d = 0; d < spec_.head_dim; ++d) score += q[d] * k[d];
      scores_[key] = score / std::sqrt(static_cast<float>(spec_.head_dim));
      largest = std::max(largest, scores_[key]);
    }
    auto* out = reinterpret_cast<float*>(row_address(layer.out, at.row, at.head));
    std::fill_n(out, spec_.head_dim_v, 0.0f);
    for (int32_t key = 0; key < at.keys; ++key) sum += std::exp(scores_[key] - largest);
    for (int32_t key = 0; key < at.keys; ++key) {
      const auto* v =
          reinterpret_cast<const float*>(v_address(cache, table.slot(table_row, key), kv_head));
      const float weight = std::exp(scores_[key] - largest) / sum;
      for (int32_t d = 0; d < spec_.head_dim_v; ++d) out[d] += weight * v[d];
    }
  }

  AttentionSpec spec_;
  KvPool& pool_;
  BatchView batch_;
  std::vector<std::byte> own_;
  float* scores_ = nullptr;
};

// Returns the reasons, each with a code, why selection must not choose this backend.
std::vector<Reason> reject(const BackendRequest& request) {
  std::vector<Reason> reasons;
  const auto unless = [&](bool fits, RejectCode code, const char* text) {
    if (!fits) reasons.push_back({code, text});
  };
  const AttentionSpec& spec = request.spec;
  unless(request.device.kind == DeviceKind::cpu, RejectCode::device, "runs on the CPU");
  unless(spec.kind == AttentionKind::mha, RejectCode::kind, "kind mha only");
  unless(spec.scope == AttentionScope::decoder, RejectCode::scope, "scope decoder only");
  unless(spec.mask == MaskKind::none, RejectCode::mask, "no masks");
  unless(spec.window == 0, RejectCode::window, "no windows");
  unless(spec.chunk == 0, RejectCode::chunk, "no chunks");
  unless(!spec.dual_chunk, RejectCode::dual_chunk, "no dual chunks");
  unless(spec.scores.logit_cap == 0, RejectCode::logit_cap, "no logit cap");
  unless(spec.scores.softmax_scale == 0, RejectCode::heads, "the default scale only");
  unless(!spec.scores.has_sinks, RejectCode::sinks, "no sinks");
  unless(!spec.scores.has_alibi, RejectCode::alibi, "no ALiBi");
  unless(!spec.has_rope, RejectCode::rope, "q and k come rotated");
  unless(!spec.needs_lse, RejectCode::lse, "no log-sum-exp");
  unless(spec.q_dtype == DType::f32, RejectCode::q_dtype, "fp32 only");
  unless(request.cache.dtype == DType::f32, RejectCode::kv_dtype, "fp32 only");
  unless(request.cache.scale == KvScale::none, RejectCode::kv_scale, "no scales");
  unless(request.cache.window == 0, RejectCode::window, "no window pools");
  return reasons;
}

BackendEntry plain_backend() {
  BackendEntry entry;
  entry.name = "plain";
  entry.role = "plain loops for fp32 decoder layers";
  entry.reject = reject;
  entry.workspace_bytes = [](const BackendRequest& request) {
    return PlainAttention::bytes(request.limits);
  };
  entry.create = [](const BackendContext& context) {
    return std::make_unique<PlainAttention>(context);
  };
  return entry;
}

// Runs a decode step for one request of 20 tokens. A page table gives its slots, as in engines with
// block tables. All new values are 1.
float decode(const Selection& selection, const BackendRequest& request, ThreadPool& threads) {
  const auto pool = make_kv_pool(request.cache, /*pages=*/8);
  const auto backend =
      selection.chosen->create({.spec = request.spec, .kv = pool.get(), .threads = &threads});
  backend->reserve(request.limits);
  const int32_t page_size = request.cache.page_size;
  const int32_t q_indptr[] = {0, 1}, kv_lens[] = {20}, rows[] = {0}, block_table[] = {3, 5};
  const int64_t out_slots[] = {block_table[1] * page_size + 19 % page_size};
  backend->plan(
      {.mode = ForwardMode::decode,
       .requests = 1,
       .tokens = 1,
       .q_indptr = q_indptr,
       .kv_lens = kv_lens,
       .request_rows = rows,
       .table = {.entries = block_table, .stride = 2, .entry_tokens = page_size, .rows = 1},
       .out_slots = out_slots,
       .hints = {.max_q_len = 1, .max_kv_len = 20}});
  std::vector<float> ones(8 * 64, 1.0f), out(8 * 64);
  backend->forward({.q = dense_rows(ones.data(), DType::f32, 8, 64),
                    .k = dense_rows(ones.data(), DType::f32, 2, 64),
                    .v = dense_rows(ones.data(), DType::f32, 2, 64),
                    .out = dense_rows(out.data(), DType::f32, 8, 64)});
  return out[0];
}

}  // namespace

int main() {
  BackendRegistry registry = BackendRegistry::builtin();
  registry.add(plain_backend());
  ThreadPool threads(2);
  BackendRequest request;
  request.spec = {.q_heads = 8, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64};
  request.cache = {.layers = 1, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64, .page_size = 16};
  request.limits = {.max_requests = 1, .max_tokens = 1, .max_q_len = 1, .max_kv_len = 64};
  request.device = cpu_device();
  request.device.cores = threads.size();

  const Selection own = select_backend(registry, request);
  const Selection library = select_backend(registry, request, {Policy::require, "reference"});
  const float difference = decode(own, request, threads) - decode(library, request, threads);
  std::cout << "chosen: " << own.chosen->name << ", differs from reference by " << difference
            << "\n";

  request.spec.window = 8;
  const Selection windowed = select_backend(registry, request);
  std::cout << "with a window: " << windowed.explain();
  const bool right = own.chosen->name == "plain" && windowed.chosen->name != "plain" &&
                     std::fabs(difference) < 1e-6f;
  return right ? 0 : 1;
}
