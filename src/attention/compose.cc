// SPDX-License-Identifier: Apache-2.0
// Backends that are composed of other backends.
#include <algorithm>

#include "attention/workspace.h"
#include "core/check.h"
#include "core/rounding.h"
#include "fovea/select_backend.h"

namespace fovea {
namespace {

void check_same_device(const AttentionBackend& a, const AttentionBackend& b) {
  check_argument(a.device() == b.device(), "'{}' is on {}, '{}' on {}", a.name(),
                 device_name(a.device()), b.name(), device_name(b.device()));
}

// One part reads what the other stores.
void check_same_storage(const AttentionBackend& a, const AttentionBackend& b) {
  const auto check = [&](const void* one, const void* other, const char* name) {
    check_argument(one == nullptr || other == nullptr || one == other,
                   "'{}' was created over the {} at {}, '{}' over that at {}: both need the same",
                   a.name(), name, one, b.name(), other);
  };
  check(a.kv(), b.kv(), "KvPool");
  check(a.state(), b.state(), "StatePool");
}

class ByPhase final : public AttentionBackend {
 public:
  ByPhase(std::unique_ptr<AttentionBackend> prefill, std::unique_ptr<AttentionBackend> decode,
          Phase verify)
      : prefill_(std::move(prefill)), decode_(std::move(decode)), verify_(verify) {
    check_argument(prefill_ != nullptr && decode_ != nullptr, "compose_by_phase needs both parts");
    check_enum(verify, Phase::decode, "verify", "Phase");
    check_same_device(*prefill_, *decode_);
    check_same_storage(*prefill_, *decode_);
    name_ = fmt::format("hybrid({}, {})", prefill_->name(), decode_->name());
  }

  std::string_view name() const override { return name_; }
  Device device() const override { return prefill_->device(); }
  const KvPool* kv() const override { return one_of(prefill_->kv(), decode_->kv()); }
  const StatePool* state() const override { return one_of(prefill_->state(), decode_->state()); }

  // A plan is valid until the next one, so both parts use the same bytes.
  size_t workspace_bytes(const BatchLimits& limits) const override {
    return std::max(prefill_->workspace_bytes(limits), decode_->workspace_bytes(limits));
  }

  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    const size_t needed = workspace_bytes(limits);
    active_ = nullptr;
    workspace = own_memory_.given_or_own(workspace, needed, device(), name_);
    prefill_->reserve(limits, workspace);
    decode_->reserve(limits, workspace);
  }

  void plan(const BatchView& batch, Stream stream) override {
    const bool decodes = batch.mode == ForwardMode::decode ||
                         (batch.mode == ForwardMode::target_verify && verify_ == Phase::decode);
    active_ = nullptr;
    AttentionBackend* chosen = decodes ? decode_.get() : prefill_.get();
    chosen->plan(batch, stream);
    active_ = chosen;
  }

  void forward(const LayerTensors& layer, Stream stream) override {
    check_argument(active_ != nullptr, "forward() without a plan");
    active_->forward(layer, stream);
  }

 private:
  template <typename Pool>
  static const Pool* one_of(const Pool* a, const Pool* b) {
    return a != nullptr ? a : b;
  }

  std::unique_ptr<AttentionBackend> prefill_;
  std::unique_ptr<AttentionBackend> decode_;
  Phase verify_;
  std::string name_;
  WorkspaceMemory own_memory_;
  AttentionBackend* active_ = nullptr;
};

class ByLayer final : public AttentionBackend {
 public:
  ByLayer(std::vector<std::unique_ptr<AttentionBackend>> parts, std::vector<int32_t> part_of_layer,
          std::vector<int32_t> layer_in_part)
      : parts_(std::move(parts)),
        part_of_layer_(std::move(part_of_layer)),
        layer_in_part_(std::move(layer_in_part)) {
    check_argument(!parts_.empty(), "compose_by_layer needs at least one part");
    check_argument(part_of_layer_.size() == layer_in_part_.size(),
                   "part_of_layer has {} layers, layer_in_part {}", part_of_layer_.size(),
                   layer_in_part_.size());
    name_ = "hybrid(";
    for (const auto& part : parts_) {
      check_argument(part != nullptr, "compose_by_layer: a part is null");
      check_same_device(*parts_.front(), *part);
      if (name_.back() != '(') name_ += ", ";
      name_ += part->name();
    }
    name_ += ")";
    for (size_t layer = 0; layer < part_of_layer_.size(); ++layer) {
      check_argument(
          part_of_layer_[layer] >= 0 && part_of_layer_[layer] < static_cast<int64_t>(parts_.size()),
          "part_of_layer[{}] is {}, must be in [0, {})", layer, part_of_layer_[layer],
          parts_.size());
      check_argument(layer_in_part_[layer] >= 0, "layer_in_part[{}] is {}, must not be negative",
                     layer, layer_in_part_[layer]);
    }
  }

  std::string_view name() const override { return name_; }
  Device device() const override { return parts_.front()->device(); }

  // All parts hold a plan at the same time, so each has its own bytes.
  size_t workspace_bytes(const BatchLimits& limits) const override {
    size_t bytes = 0;
    for (const auto& part : parts_)
      bytes += round_up(part->workspace_bytes(limits), kWorkspaceAlignment);
    return bytes;
  }

  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    planned_ = false;
    if (workspace.empty()) {
      for (const auto& part : parts_) part->reserve(limits);
      return;
    }
    check_workspace(workspace, workspace_bytes(limits), name_);
    for (const auto& part : parts_) {
      const size_t bytes = round_up(part->workspace_bytes(limits), kWorkspaceAlignment);
      part->reserve(limits, workspace.first(bytes));
      workspace = workspace.subspan(bytes);
    }
  }

  // If a part refuses the batch, earlier parts hold a plan of this batch and later parts a plan of
  // the previous one.
  void plan(const BatchView& batch, Stream stream) override {
    planned_ = false;
    for (const auto& part : parts_) part->plan(batch, stream);
    planned_ = true;
  }

  void forward(const LayerTensors& layer, Stream stream) override {
    check_argument(layer.layer >= 0 && layer.layer < static_cast<int64_t>(part_of_layer_.size()),
                   "layer is {}, must be in [0, {})", layer.layer, part_of_layer_.size());
    check_argument(planned_, "forward() without a plan");
    const auto index = static_cast<size_t>(layer.layer);
    LayerTensors inner = layer;
    inner.layer = layer_in_part_[index];
    parts_[static_cast<size_t>(part_of_layer_[index])]->forward(inner, stream);
  }

 private:
  std::vector<std::unique_ptr<AttentionBackend>> parts_;
  std::vector<int32_t> part_of_layer_;
  std::vector<int32_t> layer_in_part_;
  std::string name_;
  bool planned_ = false;
};

}  // namespace

std::unique_ptr<AttentionBackend> compose_by_phase(std::unique_ptr<AttentionBackend> prefill,
                                                   std::unique_ptr<AttentionBackend> decode,
                                                   Phase verify) {
  return std::make_unique<ByPhase>(std::move(prefill), std::move(decode), verify);
}

std::unique_ptr<AttentionBackend> compose_by_layer(
    std::vector<std::unique_ptr<AttentionBackend>> parts, std::vector<int32_t> part_of_layer,
    std::vector<int32_t> layer_in_part) {
  return std::make_unique<ByLayer>(std::move(parts), std::move(part_of_layer),
                                   std::move(layer_in_part));
}

}  // namespace fovea
