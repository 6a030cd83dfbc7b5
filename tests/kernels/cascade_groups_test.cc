// SPDX-License-Identifier: Apache-2.0
// Selection of the kernels that attend to keys that several requests share. Needs no GPU.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

DType dtype_of(const std::string& type) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f8e4m3}) {
    if (variant_type(dtype) == type) return dtype;
  }
  ADD_FAILURE() << "no dtype is " << type;
  return DType::f32;
}

// A pack without a compiler serves shared prefixes for every layer that it serves.
TEST(CascadeGroups, UseBakedKernelsWherePrefillDoes) {
  std::set<std::string> baked;
  for (const Family& each : families()) {
    for (const VariantValues& values : each.baked) {
      baked.insert(make_variant(each, values, 90).name);
    }
  }
  int setups = 0;
  const auto expect_baked = [&](const VariantValues& values, const std::string& kv, int page_size) {
    AttentionSetup setup{.sm = 90, .multiprocessors = 132};
    setup.spec.q_heads = 8;
    setup.spec.kv_heads = 2;
    setup.spec.head_dim = setup.cache.head_dim = std::stoi(values[0]);
    setup.spec.head_dim_v = setup.cache.head_dim_v = std::stoi(values[1]);
    setup.spec.q_dtype = dtype_of(values[2]);
    setup.cache.kv_heads = 2;
    setup.cache.dtype = dtype_of(kv);
    setup.cache.page_size = page_size;
    for (const gpu::KernelVariant& variant : hopper_groups().variants(setup)) {
      EXPECT_TRUE(baked.contains(variant.name)) << variant.name;
    }
    ++setups;
  };
  for (const VariantValues& values : family("sm90/prefill").baked) {
    if (values[4] == "plain" && values[5] == "whole") expect_baked(values, values[2], 64);
  }
  for (const VariantValues& values : family("sm90/prefill_fp8").baked) {
    if (values[3] == "plain") expect_baked(values, values[2], 64);
  }
  for (const VariantValues& values : family("sm90/prefill_gather").baked) {
    if (values[5] == "plain" && values[6] == "whole") {
      expect_baked(values, values[3], values[4] == "rows" ? 1 : 64);
    }
  }
  EXPECT_GT(setups, 10);
}

}  // namespace
}  // namespace fovea::kernels::cuda
