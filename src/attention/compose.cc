// SPDX-License-Identifier: Apache-2.0
// Backends that are composed of other backends.
#include <algorithm>
#include <functional>

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

class ByBatch final : public AttentionBackend {
 public:
  // Batches for which `takes_second` returns true go to the second part.
  ByBatch(std::unique_ptr<AttentionBackend> first, std::unique_ptr<AttentionBackend> second,
          std::function<bool(const BatchView&)> takes_second)
      : first_(std::move(first)),
        second_(std::move(second)),
        takes_second_(std::move(takes_second)) {
    check_same_device(*first_, *second_);
    check_same_storage(*first_, *second_);
    name_ = fmt::format("hybrid({}, {})", first_->name(), second_->name());
  }

  std::string_view name() const override { return name_; }
  Device device() const override { return first_->device(); }
  const KvPool* kv() const override { return one_of(first_->kv(), second_->kv()); }
  const StatePool* state() const override { return one_of(first_->state(), second_->state()); }

  // A plan is valid until the next one, so both parts use the same bytes.
  size_t workspace_bytes(const BatchLimits& limits) const override {
    return std::max(first_->workspace_bytes(limits), second_->workspace_bytes(limits));
  }

  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    const size_t needed = workspace_bytes(limits);
    active_ = nullptr;
    workspace = own_memory_.given_or_own(workspace, needed, device(), name_);
    first_->reserve(limits, workspace);
    second_->reserve(limits, workspace);
  }

  void plan(const BatchView& batch, Stream stream) override {
    active_ = nullptr;
    AttentionBackend* chosen = takes_second_(batch) ? second_.get() : first_.get();
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

  std::unique_ptr<AttentionBackend> first_;
  std::unique_ptr<AttentionBackend> second_;
  std::function<bool(const BatchView&)> takes_second_;
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
  check_argument(prefill != nullptr && decode != nullptr, "compose_by_phase needs both parts");
  check_enum(verify, Phase::decode, "verify", "Phase");
  return std::make_unique<ByBatch>(
      std::move(prefill), std::move(decode), [verify](const BatchView& batch) {
        return batch.mode == ForwardMode::decode ||
               (batch.mode == ForwardMode::target_verify && verify == Phase::decode);
      });
}

std::unique_ptr<AttentionBackend> compose_by_mask(std::unique_ptr<AttentionBackend> plain,
                                                  std::unique_ptr<AttentionBackend> trees) {
  check_argument(plain != nullptr && trees != nullptr, "compose_by_mask needs both parts");
  return std::make_unique<ByBatch>(std::move(plain), std::move(trees), [](const BatchView& batch) {
    return !batch.masks.tree.ancestors.empty();
  });
}

std::unique_ptr<AttentionBackend> compose_by_layer(
    std::vector<std::unique_ptr<AttentionBackend>> parts, std::vector<int32_t> part_of_layer,
    std::vector<int32_t> layer_in_part) {
  return std::make_unique<ByLayer>(std::move(parts), std::move(part_of_layer),
                                   std::move(layer_in_part));
}

}  // namespace fovea
