// SPDX-License-Identifier: Apache-2.0
#include "support/run_linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/float_types.h"
#include "support/expect_error.h"
#include "support/test_device.h"

namespace fovea::test {

struct LinearRun::Arrays : LinearSequence {
  std::vector<int32_t> q_indptr = {0}, kv_lens, state_slots, snapshot_slots, draft_counts;
  std::vector<float> out;
  // With makes_two_calls(): the input of the convolution, whose results replace the first channels
  // of `mixed`.
  std::vector<float> values;

  bool same_inputs(const Arrays& other) const {
    return q_indptr == other.q_indptr && kv_lens == other.kv_lens &&
           state_slots == other.state_slots && snapshot_slots == other.snapshot_slots &&
           draft_counts == other.draft_counts &&
           (values.empty() ? mixed == other.mixed : values == other.values) &&
           log_decay == other.log_decay && beta == other.beta;
  }
};

BackendRequest request_of(const LinearCase& test, int threads) {
  BackendRequest request;
  request.spec = test.spec;
  request.device = test_device();
  if (!on_gpu()) request.device.cores = threads;
  request.limits.max_requests = static_cast<int32_t>(test.lengths.size()) + 1;
  request.limits.max_q_len = *std::max_element(test.lengths.begin(), test.lengths.end());
  request.limits.max_kv_len = request.limits.max_q_len;
  request.limits.max_tokens = 0;
  for (int32_t length : test.lengths) request.limits.max_tokens += length + 1;
  return request;
}

void PrintTo(const LinearContract& contract, std::ostream* to) {
  *to << contract.entry.name << " on " << contract.test.name;
}

std::vector<LinearContract> linear_contracts(const std::vector<LinearCase>& cases) {
  std::vector<LinearContract> contracts;
  if (!why_no_test_device().empty()) return contracts;
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    for (const LinearCase& test : cases) {
      if (entry.reject(request_of(test, 1)).empty()) contracts.push_back({entry, test});
    }
  }
  return contracts;
}

namespace {

StateCacheSpec spec_with_drafts(const LinearCase& test, int32_t max_drafts) {
  StateCacheSpec spec = state_spec(test);
  spec.max_drafts = max_drafts;
  spec.draft_inputs = max_drafts > 0 ? draft_row(test.spec).size : 0;
  return spec;
}

}  // namespace

LinearRun::LinearRun(const BackendEntry& entry, const LinearCase& test, const LinearData& data,
                     int threads, int32_t max_drafts)
    : test_(test),
      data_(data),
      threads_(threads),
      pool_(make_state_pool(spec_with_drafts(test_, max_drafts),
                            static_cast<int32_t>(test_.lengths.size()) + 2 + kSnapshots,
                            test_device().device())),
      workspace_(entry.workspace_bytes(request_of(test_, threads)), Fill::poison) {
  // In reverse, so that slot and request numbers differ; slot 0 and the last stay free.
  for (size_t i = test_.lengths.size(); i > 0; --i) slots_.push_back(static_cast<int32_t>(i));
  for (int32_t i = 0; i < kSnapshots; ++i) {
    snapshot_slots_.push_back(static_cast<int32_t>(test_.lengths.size()) + 1 + i);
  }
  poison_states();
  BackendContext context;
  context.spec = test_.spec;
  context.state = pool_.get();
  context.device = test_device().device();
  std::span<std::byte> workspace = workspace_.bytes();
  if (on_gpu()) {
    stream_ = std::make_unique<gpu::OwnedStream>();
    device_workspace_ = std::make_unique<DeviceMirror>(HostBlocks{workspace});
    workspace = {device_workspace_->translate(workspace.data()), workspace.size()};
  } else {
    context.threads = &threads_;
  }
  backend_ = entry.create(context);
  backend_->reserve(request_of(test_, threads).limits, workspace);
}

std::vector<float> LinearRun::run(const std::vector<Piece>& pieces,
                                  const std::vector<int32_t>& snapshots, ForwardMode mode) {
  return run_with({.snapshots = snapshots}, pieces, mode);
}

std::vector<float> LinearRun::run_with(const LinearExtras& extras, const std::vector<Piece>& pieces,
                                       ForwardMode mode) {
  Arrays arrays = arrays_of(pieces, extras);
  if (on_gpu()) {
    const DeviceMirror twin(blocks(arrays));
    const Arrays before = arrays;
    pool_->publish(stream_->get());
    backend_->plan(view(arrays, mode, &twin), stream_->get());
    forward(arrays, &twin);
    gpu::synchronize(stream_->get());
    twin.download(blocks(arrays));
    EXPECT_TRUE(twin.guards_intact());
    EXPECT_TRUE(arrays.same_inputs(before));
  } else {
    backend_->plan(view(arrays, mode, nullptr));
    forward(arrays, nullptr);
  }
  EXPECT_TRUE(guards_intact());
  return rows_of(arrays);
}

std::vector<std::vector<float>> LinearRun::replay(const std::vector<std::vector<Piece>>& batches,
                                                  ForwardMode mode,
                                                  const std::vector<std::vector<int32_t>>& drafts) {
  const auto extras_of = [&](size_t batch) {
    return drafts.empty() ? LinearExtras{} : LinearExtras{.drafts = drafts[batch]};
  };
  Arrays captured = arrays_of(batches.front(), extras_of(0));
  const DeviceMirror twin(blocks(captured));
  const gpu::Graph graph = gpu::Graph::capture(stream_->get(), [&](Stream stream) {
    backend_->plan(view(captured, mode, &twin), stream);
    forward(captured, &twin);
  });
  std::vector<std::vector<float>> outputs;
  for (size_t batch = 0; batch < batches.size(); ++batch) {
    Arrays arrays = arrays_of(batches[batch], extras_of(batch));
    twin.upload(blocks(arrays));
    graph.launch(stream_->get());
    gpu::synchronize(stream_->get());
    twin.download(blocks(arrays));
    outputs.push_back(rows_of(arrays));
  }
  EXPECT_TRUE(twin.guards_intact());
  EXPECT_TRUE(guards_intact());
  return outputs;
}

std::string LinearRun::error_behind_a_refused_plan() {
  BatchView wrong;
  wrong.mode = ForwardMode::mixed;
  wrong.requests = static_cast<int32_t>(test_.lengths.size()) + 2;
  expect_invalid("requests is", [&] { backend_->plan(wrong); });
  return error_of([&] { backend_->forward({}); });
}

bool LinearRun::others_untouched() const {
  const int32_t last = pool_->slots() - 1;
  for (int32_t slot = 0; slot <= last; ++slot) {
    if (!holds_nan(0, slot)) return false;
  }
  return holds_nan(1, 0) && holds_nan(1, last);
}

bool LinearRun::holds_nan(int32_t layer, int32_t slot) const {
  const StateLayerView view = pool_->layer(layer);
  const auto is_nan = [&](const void* array, DType dtype, int64_t stride) {
    std::vector<std::byte> values(static_cast<size_t>(stride) * dtype_bytes(dtype));
    const auto* const from =
        static_cast<const std::byte*>(array) + slot * static_cast<int64_t>(values.size());
    if (on_gpu()) {
      gpu::copy_to_host(values.data(), from, values.size(), nullptr);
      gpu::synchronize(nullptr);
    } else {
      std::copy_n(from, values.size(), values.begin());
    }
    for (int64_t i = 0; i < stride; ++i) {
      if (!std::isnan(load_float(values.data(), dtype, i))) return false;
    }
    return true;
  };
  return is_nan(view.conv, DType::f32, view.conv_slot_stride) &&
         is_nan(view.state, pool_->spec().dtype, view.state_slot_stride) &&
         (view.drafts == nullptr || is_nan(view.drafts, DType::f32, draft_values()));
}

int64_t LinearRun::draft_values() const {
  return 2 * int64_t{pool_->spec().max_drafts} * pool_->spec().draft_inputs;
}

void LinearRun::poison_states() {
  for (int32_t index = 0; index < pool_->spec().layers; ++index) {
    const StateLayerView layer = pool_->layer(index);
    const auto poison = [&](void* array, DType dtype, int64_t stride) {
      const size_t bytes = static_cast<size_t>(stride * layer.slots) * dtype_bytes(dtype);
      if (on_gpu()) {
        gpu::fill_bytes(array, kPoisonByte, bytes, nullptr);
      } else {
        std::memset(array, kPoisonByte, bytes);
      }
    };
    poison(layer.conv, DType::f32, layer.conv_slot_stride);
    poison(layer.state, pool_->spec().dtype, layer.state_slot_stride);
    if (layer.drafts != nullptr) poison(layer.drafts, DType::f32, draft_values());
  }
  if (on_gpu()) gpu::synchronize(nullptr);
}

LinearRun::Arrays LinearRun::arrays_of(const std::vector<Piece>& pieces,
                                       const LinearExtras& extras) const {
  Arrays arrays;
  for (const Piece& piece : pieces) append(piece, arrays);
  arrays.draft_counts = extras.drafts;
  for (const int32_t snapshot : extras.snapshots) {
    arrays.snapshot_slots.push_back(snapshot == -1 ? -1 : snapshot_slot(snapshot));
  }
  arrays.out.assign(static_cast<size_t>((arrays.q_indptr.back() + 2) * width()), NAN);
  return arrays;
}

void LinearRun::append(const Piece& piece, Arrays& to) const {
  const bool padding = piece.request >= data_.sequences.size();
  const LinearSequence& sequence = data_.sequences[padding ? 0 : piece.request];
  const auto add = [&](const std::vector<float>& from, int64_t row, std::vector<float>& rows) {
    rows.insert(rows.end(), from.begin() + piece.begin * row, from.begin() + piece.end * row);
  };
  add(sequence.mixed, test_.spec.linear.conv_dim(), to.mixed);
  for (int32_t token = piece.begin; makes_two_calls(test_) && token < piece.end; ++token) {
    const auto x = sequence.mixed.begin() + token * int64_t{test_.spec.linear.conv_dim()};
    to.values.insert(to.values.end(), x, x + width());
  }
  const bool by_column = test_.spec.kind == AttentionKind::kda;
  add(sequence.log_decay,
      int64_t{test_.spec.linear.value_heads} * (by_column ? test_.spec.linear.key_dim : 1),
      to.log_decay);
  add(sequence.beta, test_.spec.linear.value_heads, to.beta);
  to.q_indptr.push_back(to.q_indptr.back() + piece.end - piece.begin);
  to.kv_lens.push_back(piece.end);
  to.state_slots.push_back(padding ? -1 : slots_[piece.request]);
}

BatchView LinearRun::view(const Arrays& arrays, ForwardMode mode, const DeviceMirror* twin) const {
  const auto place = [&](const std::vector<int32_t>& array) -> std::span<const int32_t> {
    if (array.empty()) return {};
    return {twin == nullptr ? array.data() : twin->translate(array.data()), array.size()};
  };
  BatchView batch;
  batch.mode = mode;
  batch.requests = static_cast<int32_t>(arrays.kv_lens.size());
  batch.tokens = arrays.q_indptr.back();
  batch.q_indptr = place(arrays.q_indptr);
  batch.kv_lens = place(arrays.kv_lens);
  batch.linear.state_slots = place(arrays.state_slots);
  batch.linear.snapshot_slots = place(arrays.snapshot_slots);
  batch.linear.draft_counts = place(arrays.draft_counts);
  for (size_t i = 0; i < arrays.kv_lens.size(); ++i) {
    const int32_t q_len = arrays.q_indptr[i + 1] - arrays.q_indptr[i];
    batch.hints.max_q_len = std::max(batch.hints.max_q_len, q_len);
    batch.hints.max_kv_len = std::max(batch.hints.max_kv_len, arrays.kv_lens[i]);
  }
  return batch;
}

void LinearRun::forward(const Arrays& arrays, const DeviceMirror* twin) {
  const Stream stream = stream_ ? stream_->get() : nullptr;
  const auto mixed = const_cast<float*>(arrays.mixed.data());
  if (makes_two_calls(test_)) {
    LinearTensors convolution = convolution_of(test_, data_, arrays);
    convolution.mixed = arrays.values.data();
    HeadRows rows = dense_rows(mixed, DType::f32, test_.spec.linear.value_heads, 1);
    rows.token_stride = test_.spec.linear.conv_dim();
    backend_->forward(tensors(convolution, rows, twin), stream);
  }
  const HeadRows rows = dense_rows(const_cast<float*>(arrays.out.data()), DType::f32,
                                   test_.spec.linear.value_heads, test_.spec.linear.value_dim);
  backend_->forward(tensors(tensors_of(test_, data_, arrays), rows, twin), stream);
}

LayerTensors LinearRun::tensors(const LinearTensors& linear, const HeadRows& out,
                                const DeviceMirror* twin) {
  const auto place = [&](const float* array) {
    return twin == nullptr || array == nullptr ? array : twin->translate(array);
  };
  LayerTensors layer;
  layer.layer = 1;
  layer.out = out;
  layer.out.data = const_cast<float*>(place(static_cast<const float*>(out.data)));
  layer.linear = linear;
  for (const float** array :
       {&layer.linear.mixed, &layer.linear.conv_weight, &layer.linear.conv_bias,
        &layer.linear.log_decay, &layer.linear.beta, &layer.linear.skip}) {
    *array = place(*array);
  }
  return layer;
}

std::vector<float> LinearRun::rows_of(Arrays& arrays) const {
  const auto live = arrays.out.begin() + arrays.q_indptr.back() * width();
  EXPECT_TRUE(std::all_of(live, arrays.out.end(), [](float x) { return std::isnan(x); }));
  return {arrays.out.begin(), live};
}

HostBlocks LinearRun::blocks(Arrays& arrays) const {
  const auto bytes = [](auto& array) { return std::as_writable_bytes(std::span(array)); };
  HostBlocks blocks = {bytes(arrays.q_indptr),     bytes(arrays.kv_lens),
                       bytes(arrays.state_slots),  bytes(arrays.snapshot_slots),
                       bytes(arrays.draft_counts), bytes(arrays.mixed),
                       bytes(arrays.log_decay),    bytes(arrays.beta),
                       bytes(arrays.out),          bytes(arrays.values)};
  for (const auto* weights :
       {&data_.conv_weight, &data_.conv_bias, &data_.skip, &data_.head_log_decay, &data_.a}) {
    blocks.push_back(bytes(const_cast<std::vector<float>&>(*weights)));
  }
  return blocks;
}

::testing::AssertionResult LinearRun::guards_intact() const {
  return on_gpu() ? device_workspace_->guards_intact() : workspace_.guards_intact();
}

}  // namespace fovea::test
