// SPDX-License-Identifier: Apache-2.0
// The table of backends, its names, and the spelling of wishes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "attention/narrow_backend.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::entry_of;
using test::expect_error;
using test::expect_invalid;
using test::gqa_request;
using test::narrow;

TEST(BackendRegistry, ResolvesTheNamesOfOtherEngines) {
  const std::map<std::string, std::string> names = {
      {"torch_native", "reference"},
      {"fa3", "flash"},
      {"FLASH_ATTN", "flash"},
      {"flashinfer", "flash"},
      {"trtllm_mha", "flash"},
      {"triton", "portable"},
      {"TRITON_ATTN", "portable"},
      {"flex_attention", "portable"},
      {"flashmla", "mla"},
      {"cutlass_mla", "mla"},
      {"CUTLASS_MLA", "mla"},
      {"FLASH_ATTN_MLA", "mla"},
      {"TRITON_MLA", "portable_mla"},
      {"nsa", "sparse_mla"},
      {"dsa", "sparse_mla"},
      {"FLASHMLA_SPARSE", "sparse_mla"},
      {"aiter", "aiter"},
      {"wave", "wave"},
      {"ascend", "ascend"},
      {"intel_xpu", "intel_xpu"},
      {"cudnn", "cudnn"},
      {"CPU_ATTN", "cpu"},
      {"intel_amx", "cpu"},
      {"GDN_ATTN", "linear"},
      {"Mamba2", "linear"},
      {"dual_chunk_flash_attn", "dual_chunk"},
  };
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const auto& [alias, name] : names) {
    const BackendEntry* entry = registry.find(alias);
    ASSERT_NE(entry, nullptr) << alias;
    EXPECT_EQ(entry->name, name) << alias;
  }
  EXPECT_EQ(registry.find("no_such"), nullptr);
}

TEST(BackendRegistry, EveryRowAnswers) {
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    EXPECT_FALSE(entry.role.empty()) << entry.name;
    const BackendRequest request = gqa_request();
    const bool not_built = std::ranges::any_of(entry.reject(request), [](const Reason& reason) {
      return reason.code == RejectCode::not_built;
    });
    EXPECT_EQ(not_built, !entry.why_not_built.empty()) << entry.name;
    if (entry.reject(request).empty()) {
      EXPECT_GT(entry.workspace_bytes(request), 0u) << entry.name;
    } else {
      const std::string name = "backend '" + entry.name + "'";
      expect_error(ErrorCode::unsupported, name, [&] { entry.workspace_bytes(request); });
      expect_error(ErrorCode::unsupported, name, [&] { entry.create({.spec = request.spec}); });
    }
  }
}

TEST(BackendRegistry, NamesAreTakenOnce) {
  BackendRegistry registry = BackendRegistry::builtin();
  for (const char* name : {"reference", "Reference", "torch_native"}) {
    expect_invalid("is taken by 'reference'", [&] { registry.add(entry_of(name, narrow())); });
  }
  BackendEntry entry = entry_of("mine", narrow());
  entry.aliases = {"FA3"};
  expect_invalid("'FA3' is taken by 'flash'", [&] { registry.add(entry); });
  registry.add(entry, TakenName::take_over);
  EXPECT_EQ(registry.find("fa3")->name, "mine");
  EXPECT_EQ(registry.find("flash_attn")->name, "flash");
  EXPECT_EQ(registry.entries().front().name, "mine");
  EXPECT_EQ(select_backend(registry, gqa_request()).chosen->name, "mine");

  const size_t before = registry.entries().size();
  registry.add(entry_of("reference", narrow()), TakenName::take_over);
  EXPECT_EQ(registry.entries().size(), before);
  EXPECT_EQ(registry.find("torch_native"), nullptr);
}

TEST(BackendRegistry, RefusesNamesNoWishCanSpell) {
  BackendRegistry registry;
  for (const char* name : {"", "auto", "AUTO", "a b", "prefer:x", "a,b"}) {
    expect_invalid("must be non-empty, without", [&] { registry.add(entry_of(name, narrow())); });
  }
  BackendEntry half = entry_of("half", narrow());
  half.create = nullptr;
  expect_invalid("'half' needs reject", [&] { registry.add(half); });
  BackendEntry odd = entry_of("odd", narrow());
  expect_invalid("taken is TakenName(17)", [&] { registry.add(odd, static_cast<TakenName>(17)); });
  odd.graphs = static_cast<GraphSupport>(17);
  expect_invalid("backend 'odd': graphs is GraphSupport(17)", [&] { registry.add(odd); });
}

TEST(BackendWish, Parses) {
  EXPECT_EQ(parse_backend_wish("auto").policy, Policy::auto_);
  EXPECT_EQ(parse_backend_wish("cpu").policy, Policy::require);
  EXPECT_EQ(parse_backend_wish("cpu").name, "cpu");
  EXPECT_EQ(parse_backend_wish("prefer:fa3").policy, Policy::prefer);
  EXPECT_EQ(parse_backend_wish("prefer:fa3").name, "fa3");
  for (const char* text : {"", "prefer:", "require:cpu", "prefer:a:b"}) {
    expect_invalid("must be 'auto', a name or", [&] { parse_backend_wish(text); });
  }
}

}  // namespace
}  // namespace fovea
