// SPDX-License-Identifier: Apache-2.0
#include "fovea/select_backend.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <map>

#include "attention/narrow_backend.h"
#include "support/deepseek_spec.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::entry_of;
using test::error_of;
using test::expect_error;
using test::expect_invalid;
using test::gqa_request;
using test::narrow;

TEST(Capability, AcceptsWhatItLists) {
  EXPECT_TRUE(capability_reasons(narrow(), gqa_request()).empty());
}

TEST(Capability, EveryCodeHasItsReason) {
  using Change = std::function<void(BackendRequest&)>;
  const std::map<RejectCode, Change> changes = {
      {RejectCode::device, [](auto& r) { r.device.kind = DeviceKind::cuda; }},
      {RejectCode::kind, [](auto& r) { r.spec.kind = AttentionKind::gated_delta_net; }},
      {RejectCode::scope, [](auto& r) { r.spec.scope = AttentionScope::encoder; }},
      {RejectCode::mask, [](auto& r) { r.spec.mask = MaskKind::tree; }},
      {RejectCode::heads, [](auto& r) { r.spec.q_heads = 6; }},
      {RejectCode::head_dim, [](auto& r) { r.spec.head_dim = 65; }},
      {RejectCode::q_dtype, [](auto& r) { r.spec.q_dtype = DType::bf16; }},
      {RejectCode::kv_dtype, [](auto& r) { r.cache.dtype = DType::f8e4m3; }},
      {RejectCode::kv_scale, [](auto& r) { r.cache.scale = KvScale::per_head; }},
      {RejectCode::kv_layout, [](auto& r) { r.cache.layout = KvLayout::mla; }},
      {RejectCode::window, [](auto& r) { r.spec.window = 8; }},
      {RejectCode::chunk, [](auto& r) { r.spec.chunk = 8; }},
      {RejectCode::dual_chunk, [](auto& r) { r.spec.dual_chunk.chunk_size = 8; }},
      {RejectCode::logit_cap, [](auto& r) { r.spec.scores.logit_cap = 30; }},
      {RejectCode::sinks, [](auto& r) { r.spec.scores.has_sinks = true; }},
      {RejectCode::alibi, [](auto& r) { r.spec.scores.has_alibi = true; }},
      {RejectCode::rope, [](auto& r) { r.spec.has_rope = true; }},
      {RejectCode::lse, [](auto& r) { r.spec.needs_lse = true; }},
      {RejectCode::batch_invariant, [](auto& r) { r.spec.batch_invariant = true; }},
  };
  for (const auto& [code, change] : changes) {
    BackendRequest request = gqa_request();
    change(request);
    const std::vector<Reason> reasons = capability_reasons(narrow(), request);
    ASSERT_EQ(reasons.size(), 1u) << reject_code_name(code);
    EXPECT_EQ(reject_code_name(reasons[0].code), reject_code_name(code)) << reasons[0].text;
    EXPECT_FALSE(reasons[0].text.empty());
  }
  // The codes from limits on do not follow from a Capability.
  EXPECT_EQ(changes.size(), static_cast<size_t>(RejectCode::limits));
}

TEST(Capability, ReportsAllReasonsNotTheFirst) {
  BackendRequest request = gqa_request();
  request.spec.window = 8;
  request.spec.scores.has_sinks = true;
  request.cache.layout = KvLayout::mla;
  EXPECT_EQ(capability_reasons(narrow(), request).size(), 3u);
}

TEST(SelectBackend, AutoTakesTheFirstThatAccepts) {
  BackendRegistry registry;
  registry.add(entry_of("wide", narrow()));
  Capability can = narrow();
  can.max_group = 1;
  registry.add(entry_of("tight", can));
  const Selection selection = select_backend(registry, gqa_request());
  EXPECT_EQ(selection.chosen->name, "wide");
  EXPECT_EQ(selection.workspace_bytes, 128u);
  ASSERT_EQ(selection.candidates.size(), 2u);
  EXPECT_EQ(selection.candidates[0].name, "tight");
  EXPECT_EQ(selection.candidates[0].reasons[0].code, RejectCode::heads);
  EXPECT_NE(
      selection.explain().find("tight: rejected\n  heads: 2 q heads share a kv head, at most 1"),
      std::string::npos)
      << selection.explain();
}

TEST(SelectBackend, RequireNeverChanges) {
  const BackendRegistry registry = BackendRegistry::builtin();
  expect_error(ErrorCode::unsupported, {"'fa3'", "flash: rejected", "device: ", "q_dtype: "}, [&] {
    select_backend(registry, gqa_request(), {Policy::require, "fa3"});
  });
  EXPECT_EQ(select_backend(registry, gqa_request(), {Policy::require, "reference"}).chosen->name,
            "reference");
}

// As SGLang's flashinfer, a name can mean another backend for other layers.
TEST(SelectBackend, ARefusalNamesWhoWouldServe) {
  const BackendRegistry registry = BackendRegistry::builtin();
  const auto refusal = [&](const BackendRequest& request) {
    return error_of(
        [&] {
          select_backend(registry, request, {Policy::require, "flashinfer"});
        },
        ErrorCode::unsupported);
  };
  EXPECT_TRUE(refusal(gqa_request()).ends_with("\naccepted by: cpu, reference"));
  BackendRequest impossible = gqa_request();
  impossible.cache.dtype = DType::i64;
  EXPECT_TRUE(refusal(impossible).ends_with("\naccepted by: none"));
}

TEST(SelectBackend, AutoSaysWhyItTakesAStandIn) {
  BackendRegistry registry;
  BackendEntry stand_in = entry_of("stand_in", narrow());
  stand_in.stands_in_for = "first";
  registry.add(stand_in);
  Capability can = narrow();
  can.max_head_dim = 32;
  can.q_dtypes = {};
  registry.add(entry_of("first", can));
  registry.add(entry_of("unrelated", can));
  const Selection selection = select_backend(registry, gqa_request());
  EXPECT_EQ(selection.chosen->name, "stand_in");
  EXPECT_EQ(selection.asked, "");
  EXPECT_EQ(selection.fallback,
            "stand_in serves instead of first: head_dim is 64, at most 32; q_dtype is fp32, "
            "accepted: none");
  EXPECT_EQ(select_backend(registry, gqa_request(), {Policy::require, "stand_in"}).fallback, "");
  registry.add(entry_of("first", narrow()), TakenName::take_over);
  EXPECT_EQ(select_backend(registry, gqa_request()).fallback, "");
}

TEST(SelectBackend, PortableBackendsStandInForThoseOfHopper) {
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const auto& [portable, hopper] : {std::pair{"portable", "flash"}, {"portable_mla", "mla"}}) {
    EXPECT_EQ(registry.find(portable)->stands_in_for, hopper);
    EXPECT_NE(registry.find(hopper), nullptr);
  }
}

TEST(SelectBackend, PreferFallsBackAndSaysSo) {
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection automatic = select_backend(registry, gqa_request());
  const Selection preferred =
      select_backend(registry, gqa_request(), {Policy::prefer, "FLASH_ATTN"});
  EXPECT_EQ(preferred.chosen, automatic.chosen);
  EXPECT_NE(preferred.explain().find("FLASH_ATTN"), std::string::npos) << preferred.explain();
  // Every reason, on one line.
  for (const char* text : {preferred.chosen->name.c_str(), "FLASH_ATTN", "NVIDIA GPUs", "q_dtype"})
    EXPECT_NE(preferred.fallback.find(text), std::string::npos) << preferred.fallback;
  EXPECT_NE(preferred.fallback.find("; q_dtype"), std::string::npos) << preferred.fallback;
  EXPECT_EQ(preferred.fallback.find('\n'), std::string::npos);
  EXPECT_EQ(automatic.fallback, "");
  EXPECT_EQ(select_backend(registry, gqa_request(), {Policy::prefer, "torch_native"}).fallback, "");
  EXPECT_EQ(select_backend(registry, gqa_request(), {Policy::prefer, "torch_native"}).chosen->name,
            "reference");
}

TEST(SelectBackend, ExplainsTheChoiceLineByLine) {
  Capability can = narrow();
  can.max_group = 1;
  can.q_dtypes = {};
  BackendEntry wide = entry_of("wide", narrow());
  wide.role = "serves";
  wide.notes = [](const BackendRequest& request) {
    return std::string("heads of ") + std::to_string(request.spec.head_dim);
  };
  BackendRegistry registry;  // the last added comes first
  registry.add(entry_of("late", narrow()));
  registry.add(std::move(wide));
  registry.add(entry_of("tight", can));
  const std::string others =
      "tight: rejected\n  heads: 2 q heads share a kv head, at most 1\n"
      "  q_dtype: q_dtype is fp32, accepted: none\n"
      "late: accepts too, not asked for or later in the order of preference\n";
  const std::string wide_text = ", workspace 128 bytes\n  serves\n  heads of 64\n" + others;
  const auto explained = [&](const char* wish) {
    return select_backend(registry, gqa_request(), parse_backend_wish(wish)).explain();
  };
  EXPECT_EQ(explained("auto"), "wide: chosen, the first that accepts" + wide_text);
  EXPECT_EQ(explained("wide"), "wide: chosen, asked for wide" + wide_text);
  EXPECT_EQ(explained("prefer:tight"),
            "wide: chosen, as the preferred tight is rejected" + wide_text);
  EXPECT_TRUE(explained("late").starts_with(
      "late: chosen, asked for late, workspace 128 bytes\ntight: rejected\n"));
}

// Requests are checked for a caller's own table, too.
TEST(SelectBackend, ChecksRequestsBeforeAnyBackendIsAsked) {
  BackendRegistry registry;
  registry.add(entry_of("wide", narrow()));
  BackendRequest request = gqa_request();
  expect_invalid("policy is Policy(17)", [&] {
    select_backend(registry, request, {static_cast<Policy>(17), "wide"});
  });
  request.limits.max_tokens = 0;
  expect_invalid("max_tokens is 0", [&] { select_backend(registry, request); });
}

TEST(SelectBackend, IsPure) {
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection first = select_backend(registry, gqa_request());
  select_backend(registry, gqa_request(), {Policy::require, "reference"});
  EXPECT_EQ(select_backend(registry, gqa_request()).explain(), first.explain());
}

TEST(SelectBackend, UnknownNamesListTheKnownOnes) {
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const Policy policy : {Policy::require, Policy::prefer}) {
    const std::string text = error_of([&] {
      select_backend(registry, gqa_request(), {policy, "fa33"});
    });
    EXPECT_NE(text.find("'fa33'"), std::string::npos) << text;
    for (const BackendEntry& entry : registry.entries()) {
      EXPECT_NE(text.find(entry.name), std::string::npos) << entry.name;
    }
  }
}

TEST(SelectBackend, NothingFitsNamesEveryBackend) {
  const BackendRegistry registry = BackendRegistry::builtin();
  BackendRequest request = gqa_request();
  request.device = {.kind = DeviceKind::cuda, .sm = 75};
  const std::string text =
      error_of([&] { select_backend(registry, request); }, ErrorCode::unsupported);
  EXPECT_FALSE(text.ends_with('\n'));
  for (const BackendEntry& entry : registry.entries()) {
    EXPECT_NE(text.find(entry.name + ": rejected"), std::string::npos) << entry.name;
  }
}

// MLA layers over a cache of 656-byte rows.
void set_latent_rows(BackendRequest& request) {
  request.spec = test::deepseek_spec();
  request.cache = test::deepseek_cache();
  request.cache.layout = KvLayout::mla_fp8_rows;
  request.cache.dtype = DType::f8e4m3;
}

TEST(SelectBackend, RefusesContradictions) {
  using Change = std::function<void(BackendRequest&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"q_heads is 0", [](auto& r) { r.spec.q_heads = 0; }},
      {"q_heads is 5", [](auto& r) { r.spec.q_heads = 5; }},
      {"head_dim is 0", [](auto& r) { r.spec.head_dim = 0; }},
      {"head_dim_v is -1", [](auto& r) { r.spec.head_dim_v = -1; }},
      {"cache kv_heads is 4", [](auto& r) { r.cache.kv_heads = 4; }},
      {"cache head_dim is 32", [](auto& r) { r.cache.head_dim = 32; }},
      {"page_size is 0", [](auto& r) { r.cache.page_size = 0; }},
      {"only fp8 caches take scales", [](auto& r) { r.cache.scale = KvScale::per_tensor; }},
      {"cache layout", [](auto& r) { r.cache.layout = KvLayout::mla; }},
      {"cache layers is -1", [](auto& r) { r.cache.layers = -1; }},
      {"cache order is KvOrder(9)", [](auto& r) { r.cache.order = static_cast<KvOrder>(9); }},
      {"device cores is 0", [](auto& r) { r.device.cores = 0; }},
      {"cache window is 8", [](auto& r) { r.cache.window = 8; }},
      {"window is -1", [](auto& r) { r.spec.window = -1; }},
      {"chunk is -1", [](auto& r) { r.spec.chunk = -1; }},
      {"logit_cap is -1", [](auto& r) { r.spec.scores.logit_cap = -1; }},
      {"softmax_scale is nan",
       [](auto& r) { r.spec.scores.softmax_scale = std::numeric_limits<float>::quiet_NaN(); }},
      {"mla.nope_dim is 128, must be 0 for kind mha", [](auto& r) { r.spec.mla.nope_dim = 128; }},
      {"head_dim is 64, must be 0 for kind mla", [](auto& r) { r.spec.kind = AttentionKind::mla; }},
      {"kv_heads is 2, kind mla has 1",
       [](auto& r) {
         r.spec = test::deepseek_spec();
         r.spec.kv_heads = 2;
       }},
      {"the layers have 512 + 64 and the cache dtype is fp8_e5m2",
       [](auto& r) {
         set_latent_rows(r);
         r.cache.dtype = DType::f8e5m2;
       }},
      {"the cache dtype is fp8_e4m3 with scales per_tensor",
       [](auto& r) {
         set_latent_rows(r);
         r.cache.scale = KvScale::per_tensor;
       }},
      {"window is 4, must be 0: linear kinds",
       [](auto& r) {
         r.spec = {.kind = AttentionKind::gated_delta_net,
                   .window = 4,
                   .linear = {.key_heads = 1, .value_heads = 1, .key_dim = 8, .value_dim = 8}};
       }},
      {"conv_width is 4", [](auto& r) { r.spec.linear.conv_width = 4; }},
      {"need scope decoder",
       [](auto& r) {
         r.spec.scope = AttentionScope::encoder;
         r.spec.window = 8;
       }},
      {"cache dtype is fp32, q_dtype fp8_e4m3 needs the same",
       [](auto& r) { r.spec.q_dtype = DType::f8e4m3; }},
      {"of fp8 types only fp8_e4m3 multiplies", [](auto& r) { r.spec.q_dtype = DType::f8e5m2; }},
      {"q of fp8_e4m3 cannot be rotated",
       [](auto& r) {
         r.spec.q_dtype = r.cache.dtype = DType::f8e4m3;
         r.spec.has_rope = true;
       }},
      {"max_encoder_len is 0", [](auto& r) { r.spec.scope = AttentionScope::cross; }},
      {"max_requests is 0", [](auto& r) { r.limits.max_requests = 0; }},
      {"max_tokens is -3", [](auto& r) { r.limits.max_tokens = -3; }},
  };
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const auto& [words, change] : changes) {
    BackendRequest request = gqa_request();
    change(request);
    expect_invalid(words, [&] { select_backend(registry, request); });
  }
}

}  // namespace
}  // namespace fovea
