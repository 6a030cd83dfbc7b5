// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_rows.h"

#include <algorithm>

namespace fovea {
namespace {

// A node's slot and number, in DraftRows::on_device_.
constexpr size_t kSlotBytes = sizeof(int64_t);
constexpr size_t kNodeBytes = kSlotBytes + sizeof(int32_t);

// Features as a cache of one layer, whose rows are wide heads.
class FeaturePool final : public KvPool {
 public:
  FeaturePool(float* rows, int32_t width, CacheSet& caches, Device device)
      : rows_(rows), pages_(caches.pages().pages()), device_(device) {
    spec_.layout = KvLayout::mla;
    spec_.layers = spec_.kv_heads = 1;
    spec_.head_dim = spec_.head_dim_v = width;
    spec_.page_size = caches.page_size();
  }
  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return pages_; }
  Device device() const override { return device_; }
  KvLayerView layer(int32_t) const override {
    KvLayerView view;
    view.layout = KvLayout::mla;
    view.page_size = spec_.page_size;
    view.slots = pages_ * spec_.page_size;
    view.k = view.v = reinterpret_cast<char*>(rows_);
    view.k_token_stride = view.v_token_stride = spec_.head_dim;
    view.k_page_stride = view.v_page_stride = int64_t{spec_.page_size} * spec_.head_dim;
    return view;
  }

 private:
  KvCacheSpec spec_;
  float* rows_;
  int64_t pages_;
  Device device_;
};

}  // namespace

DraftRows::DraftRows(const SpeculationLimits& limits, CacheSet& caches, Model& model,
                     float* features, ThreadPool& threads)
    : limits_(limits), caches_(caches), device_(model.device()) {
  const bool on_gpu = device_.kind() == DeviceKind::cuda;
  std::vector<KvPool*> pools;
  for (size_t group = 0; group < model.info().groups.size(); ++group) {
    pools.push_back(caches.kv(group));
  }
  const Device device = pools.front()->device();
  if (features != nullptr) {
    features_ = std::make_unique<FeaturePool>(features, model.info().hidden, caches, device);
    pools.push_back(features_.get());
  }
  speculation_ = make_speculation(limits, pools, device, on_gpu ? nullptr : &threads);
  const auto requests = static_cast<size_t>(limits.max_requests);
  const size_t nodes = requests * static_cast<size_t>(limits.width);
  slots_.reserve(nodes);
  nodes_.reserve(nodes);
  counts_.reserve(requests);
  if (on_gpu) on_device_ = gpu::DeviceBuffer(nodes * kNodeBytes + requests * sizeof(int32_t));
}

void DraftRows::add(const CacheLease& lease, int32_t begin, std::span<const int32_t> nodes) {
  const auto count = static_cast<int32_t>(nodes.size());
  if (count == 0 || nodes.back() == count) return;  // the rows are in their places
  const std::span<const int32_t> row = caches_.table().row(lease.row);
  const size_t first = nodes_.size(), end = first + static_cast<size_t>(limits_.width);
  for (int32_t node = 0; node <= nodes.back(); ++node) {
    slots_.push_back(row[static_cast<size_t>(begin + node)]);
  }
  slots_.resize(end, -1);
  nodes_.push_back(0);
  nodes_.insert(nodes_.end(), nodes.begin(), nodes.end());
  nodes_.resize(end, -1);
  counts_.push_back(1 + count);
}

void DraftRows::move() {
  if (counts_.empty()) return;
  int64_t* slots = slots_.data();
  int32_t *counts = counts_.data(), *nodes = nodes_.data();
  const Stream stream = device_.stream();
  if (on_device_.bytes() > 0) {
    device_.bind();
    const auto copy = [&](auto*& array, size_t offset, size_t count) {
      std::byte* const to = on_device_.data<std::byte>() + offset;
      gpu::copy_to_device(to, array, count * sizeof(*array), stream);
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(to);
    };
    copy(slots, 0, slots_.size());
    copy(nodes, slots_.size() * kSlotBytes, nodes_.size());
    copy(counts, slots_.size() * kNodeBytes, counts_.size());
  }
  const size_t requests = counts_.size(), all = slots_.size();
  Drafts drafts;
  drafts.requests = static_cast<int32_t>(requests);
  drafts.width = limits_.width;
  drafts.lens = {counts, requests};  // any array: lengths are the host's
  DraftArrays arrays;
  arrays.out_slots = {slots, all};
  AcceptedDrafts accepted;
  accepted.counts = {counts, requests};
  accepted.nodes = {nodes, all};
  speculation_->commit(drafts, arrays, accepted, {}, stream);
  slots_.clear();
  counts_.clear();
  nodes_.clear();
}

}  // namespace fovea
