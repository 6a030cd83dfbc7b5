// SPDX-License-Identifier: Apache-2.0
// Compositions of backends, and merging of their results.
#include "c/handles.h"
#include "c/specs.h"
#include "c/tensors.h"

namespace fovea::c {
namespace {

constexpr fovea_layer_parts kDefaultParts = {.struct_size = sizeof(fovea_layer_parts)};

// A part of a composition that stays a handle of its own.
class SharedPart final : public AttentionBackend {
 public:
  explicit SharedPart(std::shared_ptr<AttentionBackend> part) : part_(std::move(part)) {}

  std::string_view name() const override { return part_->name(); }
  Device device() const override { return part_->device(); }
  const KvPool* kv() const override { return part_->kv(); }
  const StatePool* state() const override { return part_->state(); }
  size_t workspace_bytes(const BatchLimits& limits) const override {
    return part_->workspace_bytes(limits);
  }
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    part_->reserve(limits, workspace);
  }
  void plan(const BatchView& batch, Stream stream) override { part_->plan(batch, stream); }
  void forward(const LayerTensors& layer, Stream stream) override { part_->forward(layer, stream); }

 private:
  std::shared_ptr<AttentionBackend> part_;
};

std::unique_ptr<AttentionBackend> share(const fovea_backend& part) {
  return std::make_unique<SharedPart>(part.object);
}

// Tensors of a layer are checked by one spec, so both must agree on their shapes.
void check_same_tensors(const AttentionSpec& a, const AttentionSpec& b) {
  const bool same = a.kind == b.kind && a.scope == b.scope && a.q_heads == b.q_heads &&
                    a.kv_heads == b.kv_heads && a.head_dim == b.head_dim &&
                    a.head_dim_v == b.head_dim_v && a.q_dtype == b.q_dtype && a.mla == b.mla &&
                    a.linear == b.linear;
  check(same, "decode has other heads, widths or dtypes than prefill");
}

void add_part(fovea_backend& composition, const fovea_backend& part) {
  composition.owners.insert(composition.owners.end(), part.owners.begin(), part.owners.end());
}

std::unique_ptr<fovea_backend> by_layer(const fovea_layer_parts& from) {
  check(from.layers > 0, "parts.layers is {}, must be positive", from.layers);
  const auto layers = static_cast<size_t>(from.layers);
  const auto part_of_layer = entries(from.part_of_layer, layers, "parts.part_of_layer");
  const auto layer_in_part = entries(from.layer_in_part, layers, "parts.layer_in_part");
  auto made = std::make_unique<fovea_backend>();
  made->by_layer = true;
  std::vector<std::unique_ptr<AttentionBackend>> parts;
  std::vector<const fovea_backend*> given;
  for (fovea_backend* const part : entries(from.parts, from.part_count, "parts.parts")) {
    const fovea_backend& handle = need(part, "an entry of parts.parts");
    check(!handle.by_layer, "an entry of parts.parts is a composition by layer");
    given.push_back(&handle);
    parts.push_back(share(handle));
    add_part(*made, handle);
  }
  for (const int32_t part : part_of_layer) {
    check(part >= 0 && static_cast<size_t>(part) < given.size(),
          "an entry of parts.part_of_layer is {}, must be in [0, {})", part, given.size());
    made->specs.push_back(given[static_cast<size_t>(part)]->specs.front());
  }
  made->object = compose_by_layer(std::move(parts), {part_of_layer.begin(), part_of_layer.end()},
                                  {layer_in_part.begin(), layer_in_part.end()});
  return made;
}

AttentionState to_state(const fovea_attention_state* state, const fovea_merger& merger,
                        std::string_view name, int64_t tokens) {
  check_pointer(state, name);
  check_alignment(state, alignof(fovea_attention_state), name);
  const bool into = name == "into";
  const int64_t rows[] = {tokens, merger.shape.heads};
  return {.out = head_rows(state->out, {into ? "into.out" : "part.out", merger.device},
                           {tokens, merger.shape.heads, merger.shape.dim}),
          .lse = NaturalLse(const_cast<float*>(
              dense_floats(state->lse, {into ? "into.lse" : "part.lse", merger.device}, rows)))};
}

}  // namespace
}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_compose_by_phase(fovea_backend* prefill, fovea_backend* decode, int32_t verify,
                                    fovea_backend** backend) {
  return guarded([&] {
    clear_handle(backend, "backend");
    const fovea_backend& first = need(prefill, "prefill");
    const fovea_backend& second = need(decode, "decode");
    check(!first.by_layer && !second.by_layer, "prefill or decode is a composition by layer");
    check_same_tensors(first.specs.front(), second.specs.front());
    auto made = std::make_unique<fovea_backend>();
    made->specs = first.specs;
    add_part(*made, first);
    add_part(*made, second);
    made->object = fovea::compose_by_phase(share(first), share(second),
                                           to_enum(verify, fovea::Phase::decode, "verify"));
    give_handle(std::move(made), backend);
  });
}

fovea_status fovea_layer_parts_init(fovea_layer_parts* parts, size_t struct_size) {
  return init_struct(parts, struct_size, kDefaultParts, "parts");
}

fovea_status fovea_compose_by_layer(const fovea_layer_parts* parts, fovea_backend** backend) {
  return guarded([&] {
    clear_handle(backend, "backend");
    give_handle(by_layer(read_struct(parts, kDefaultParts, "parts")), backend);
  });
}

fovea_status fovea_merger_create(fovea_dtype dtype, int32_t heads, int32_t dim, fovea_device device,
                                 fovea_thread_pool* threads, fovea_merger** merger) {
  return guarded([&] {
    clear_handle(merger, "merger");
    auto made = std::make_unique<fovea_merger>();
    made->shape = {to_enum(dtype, fovea::DType::u8, "dtype"), heads, dim};
    made->device = to_device(device);
    if (threads != nullptr) made->threads = need(threads, "threads").object;
    made->object = fovea::make_state_merger(made->shape, made->device, made->threads.get());
    give_handle(std::move(made), merger);
  });
}

fovea_status fovea_merger_destroy(fovea_merger* merger) { return destroy_handle(merger, "merger"); }

fovea_status fovea_merger_merge(fovea_merger* merger, const fovea_attention_state* into,
                                const fovea_attention_state* part, int64_t tokens, void* stream) {
  return guarded([&] {
    fovea_merger& given = need(merger, "merger");
    check(tokens >= 0, "tokens is {}, must not be negative", tokens);
    given.object->merge(to_state(into, given, "into", tokens),
                        to_state(part, given, "part", tokens), tokens,
                        static_cast<fovea::Stream>(stream));
  });
}
