// SPDX-License-Identifier: Apache-2.0
#include "cli/layer_widths.h"

#include <fmt/format.h>

#include "fovea/error.h"

namespace fovea::cli {
namespace {

struct Widths {
  int32_t q_heads, kv_heads, head_dim, head_dim_v, conv_width;
};

Widths linear_widths(const std::string& kind) {
  if (kind == "mamba1") return {1, 8192, 16, 1, 0};
  if (kind == "short_conv") return {0, 2048, 0, 1, 3};
  return {16, 32, 128, 0, 0};
}

}  // namespace

void set_default_widths(const CLI::App& command, const std::string& kind, AttentionSpec& spec) {
  const auto given = [&](const char* flag) { return command.get_option(flag)->count() > 0; };
  const auto fill = [&](const char* flag, int32_t value, int32_t& width) {
    if (!given(flag)) width = value;
  };
  if (kind == "mla") {
    fill("--q-heads", 128, spec.q_heads);
    fill("--kv-heads", 1, spec.kv_heads);
    if (given("--head-dim") || given("--head-dim-v") || given("--nope-dim") || given("--v-dim"))
      return;
    spec.head_dim = 576;
    spec.head_dim_v = 512;
    spec.mla.nope_dim = spec.mla.v_dim = 128;
  } else if (kind != "mha") {
    const Widths widths = linear_widths(kind);
    fill("--q-heads", widths.q_heads, spec.q_heads);
    fill("--kv-heads", widths.kv_heads, spec.kv_heads);
    fill("--head-dim", widths.head_dim, spec.head_dim);
    fill("--head-dim-v", widths.head_dim_v, spec.head_dim_v);
    fill("--conv-width", widths.conv_width, spec.linear.conv_width);
  }
}

void place_widths(AttentionSpec& spec) {
  if (spec.kind == AttentionKind::mla) {
    if (spec.head_dim_v == 0) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--head-dim-v is 0: kind mla needs the width of the latent, "
                              "the rest of --head-dim {} is the rotary key",
                              spec.head_dim));
    }
    spec.mla.kv_lora_rank = spec.head_dim_v;
    spec.mla.rope_dim = spec.head_dim - spec.head_dim_v;
    spec.head_dim = spec.head_dim_v = 0;
    return;
  }
  if (spec.head_dim_v == 0) spec.head_dim_v = spec.head_dim;
  if (!is_linear(spec.kind)) return;
  spec.linear = {spec.q_heads, spec.kv_heads, spec.head_dim, spec.head_dim_v,
                 spec.linear.conv_width};
  spec.q_heads = spec.kv_heads = spec.head_dim = spec.head_dim_v = 0;
}

}  // namespace fovea::cli
