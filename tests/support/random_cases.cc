// SPDX-License-Identifier: Apache-2.0
#include "support/random_cases.h"

#include <fmt/core.h>

#include <initializer_list>
#include <iterator>
#include <random>
#include <string_view>

#include "attention/names.h"
#include "attention/validate/spec.h"
#include "fovea/error.h"
#include "support/cases.h"
#include "support/test_device.h"

namespace fovea::test {
namespace {

// Draws the features of a case and adds unusual ones to its name.
class Drawer {
 public:
  explicit Drawer(uint64_t seed) : random_(seed) {}

  AttentionCase draw_dual_chunk(int number) {
    AttentionCase test = draw(number);
    test.name.replace(0, std::string_view("random").size(), "random_dual_chunk");
    test.spec.dual_chunk.chunk_size = pick({1, 2, 17, 40, 64, 100});
    test.spec.dual_chunk.local_size = between(0, test.spec.dual_chunk.chunk_size - 1);
    return test;
  }

  AttentionCase draw(int number) {
    const bool mla = one_in(5);
    test_ = mla ? mla_case("", pick({1, 2, 5, 16})) : mha_case("", 1, 1, 64);
    test_.name = fmt::format("random_{}", number);
    test_.seed = static_cast<uint32_t>(number + 1);
    mla ? draw_mla() : draw_heads();
    draw_types();
    draw_cache();
    draw_scores();
    test_.strided = sometimes(4, "strided");
    draw_requests();
    draw_contents();
    return test_;
  }

 private:
  int32_t pick(std::initializer_list<int32_t> values) {
    return values.begin()[random_() % values.size()];
  }
  int32_t between(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int32_t n) { return between(1, n) == 1; }
  bool sometimes(int32_t n, std::string_view name) {
    if (!one_in(n)) return false;
    add_name(name);
    return true;
  }
  void add_name(std::string_view part) { test_.name += fmt::format("_{}", part); }

  void draw_heads() {
    AttentionSpec& spec = test_.spec;
    spec.kv_heads = pick({1, 1, 2, 3});
    spec.q_heads = spec.kv_heads * pick({1, 2, 3, 4, 5, 7, 8, 13});
    spec.head_dim = 8 * pick({5, 8, 8, 10, 12, 16, 16, 16, 19, 24, 32});
    spec.head_dim_v = one_in(4) ? 8 * pick({4, 8, 14, 16, 23}) : spec.head_dim;
    if (one_in(3)) {
      spec.scope = static_cast<AttentionScope>(between(1, 4));
      add_name(name_of(spec.scope));
    }
    add_name(fmt::format("{}_{}_dim_{}_{}", spec.q_heads, spec.kv_heads, spec.head_dim,
                         spec.head_dim_v));
  }

  void draw_mla() {
    AttentionSpec& spec = test_.spec;
    spec.mla.kv_lora_rank = pick({512, 512, 256});
    spec.mla.rope_dim = pick({64, 64, 0});
    spec.head_dim = spec.head_dim_v = 0;
    add_name(fmt::format("mla_{}_{}_{}", spec.q_heads, spec.mla.kv_lora_rank, spec.mla.rope_dim));
    test_.split_q = spec.mla.rope_dim > 0 && sometimes(3, "split");
    if (!sometimes(3, "weights")) return;
    spec.mla.nope_dim = 8 * pick({8, 16});
    spec.mla.v_dim = 8 * pick({8, 16});
    spec.scores.softmax_scale = 0;
  }

  void draw_types() {
    constexpr DType kFloats[] = {DType::bf16, DType::bf16, DType::f16, DType::f32};
    AttentionSpec& spec = test_.spec;
    spec.q_dtype = kFloats[between(0, on_gpu() ? 2 : 3)];
    test_.cache.dtype = spec.q_dtype;
    if (!is_packed(spec.scope) && one_in(2)) {
      test_.cache.dtype = one_in(4) ? DType::f8e5m2 : DType::f8e4m3;
      test_.cache.scale = kScales[between(0, 3)];
      if (is_mla(spec) && one_in(3)) {
        test_.cache.layout = KvLayout::mla_fp8_rows;
        test_.cache.scale = KvScale::none;
        add_name("rows");
      }
      if (one_in(4)) spec.q_dtype = DType::f8e4m3;
    }
    add_name(dtype_name(spec.q_dtype));
    if (test_.cache.dtype == spec.q_dtype && !is_fp8(spec.q_dtype)) return;
    add_name(dtype_name(test_.cache.dtype));
    add_name(scale_name(test_.cache.scale));
  }

  void draw_cache() {
    test_.cache.page_size = pick({1, 2, 5, 16, 16, 48, 64, 128});
    add_name(fmt::format("page_{}", test_.cache.page_size));
    if (!is_mla(test_.spec) && sometimes(4, "hnd")) test_.cache.order = KvOrder::hnd;
  }

  void draw_scores() {
    AttentionSpec& spec = test_.spec;
    if (one_in(3)) {
      spec.mask = static_cast<MaskKind>(between(1, 4));
      add_name(name_of(spec.mask));
    }
    if (sometimes(4, "window")) spec.window = pick({1, 7, 40, 150});
    if (sometimes(6, "chunk")) spec.chunk = pick({1, 16, 100});
    if (sometimes(5, "cap")) spec.scores.logit_cap = static_cast<float>(pick({2, 8, 50}));
    spec.scores.has_sinks = sometimes(4, "sinks");
    test_.infinite_sinks = spec.scores.has_sinks && one_in(4);
    spec.scores.has_alibi = sometimes(6, "alibi");
    spec.has_rope = sometimes(6, "rope");
    const int32_t most = is_mla(spec) ? spec.mla.rope_dim : spec.head_dim;
    if (spec.has_rope && one_in(2)) test_.rotary_dim = 4 * between(1, std::max(1, most / 4));
    test_.rope_interleaved = one_in(2);
    spec.batch_invariant = sometimes(5, "invariant");
    if (one_in(6)) spec.scores.softmax_scale = 0.2f;
  }

  void draw_requests() {
    const AttentionSpec& spec = test_.spec;
    test_.requests.clear();
    test_.mode = one_in(3) ? ForwardMode::decode : ForwardMode::mixed;
    if (spec.mask == MaskKind::tree) test_.mode = ForwardMode::target_verify;
    const int32_t drafts = pick({1, 4, 15, 40});
    for (int32_t left = between(1, 5); left > 0; --left) {
      RequestShape shape;
      shape.q_len = test_.mode == ForwardMode::decode ? between(0, 1) : pick({0, 1, 2, 9, 33});
      if (spec.mask == MaskKind::tree) shape.q_len = drafts;
      const int32_t before = pick({0, 0, 3, 64, 130});
      shape.kv_len = shape.q_len + before;
      if (spec.scope == AttentionScope::cross) shape.kv_len = before;
      if (is_packed(spec.scope) || spec.scope == AttentionScope::encoder_cache)
        shape.kv_len = shape.q_len;
      test_.requests.push_back(shape);
    }
  }

  void draw_contents() {
    const AttentionSpec& spec = test_.spec;
    test_.growing_scores = sometimes(5, "growing");
    if (spec.scope != AttentionScope::decoder) return;
    if (sometimes(8, "prewritten")) {
      test_.prewritten = true;
    } else if (sometimes(8, "skip")) {
      test_.skip_some_writes = true;
    }
    const bool dropped = spec.window > 0 && !is_mla(spec) && spec.mask != MaskKind::prefix_spans;
    if (dropped && sometimes(2, "pool")) {
      test_.window_pool = true;
    } else if (spec.mask != MaskKind::tree && sometimes(6, "moved")) {
      test_.moved_tokens = true;
    }
    if (!sometimes(3, "shared")) return;
    test_.shared_prefix = 2 * test_.cache.page_size;
    test_.prefix_levels = between(0, 3);
    for (RequestShape& shape : test_.requests) shape.kv_len += test_.shared_prefix;
  }

  std::mt19937_64 random_;
  AttentionCase test_;
};

bool contradictory(const AttentionCase& test) {
  try {
    validate_request({test.spec, complete_cache(test), limits_of(test), {}});
    return false;
  } catch (const Error&) {
    return true;
  }
}

}  // namespace

void add_random_cases(int count, std::vector<AttentionCase>& cases) {
  Drawer drawer(2026);
  const auto add = [&](int wanted, auto draw) {
    for (int number = 0; number < wanted;) {
      AttentionCase test = (drawer.*draw)(number);
      if (contradictory(test)) continue;
      cases.push_back(std::move(test));
      ++number;
    }
  };
  add(count, &Drawer::draw);
  add(count / 4, &Drawer::draw_dual_chunk);
}

}  // namespace fovea::test
