// SPDX-License-Identifier: Apache-2.0
// The compiler's report and the kernel families, on machines without a GPU or NVRTC.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "gpu/kernel_pack.h"
#include "kernels/cuda/family.h"

namespace fovea::gpu {
namespace {

TEST(ResourceReport, BelongsToItsEntryPoint) {
  const std::string log =
      "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
      "    96 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
      "ptxas info    : Used 255 registers, 10 bytes smem\n"
      "ptxas info    : Compiling entry function 'fovea_kernel' for 'sm_90a'\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 203 registers, used 1 barriers, 400 bytes smem\n";
  EXPECT_EQ(parse_resource_use(log, "fovea_kernel").registers, 203);
  EXPECT_EQ(parse_resource_use(log, "fovea_kernel").spill_bytes, 0);
  EXPECT_EQ(parse_resource_use(log, "fovea_kernel").shared_bytes, 400);
  EXPECT_EQ(parse_resource_use(log, "other").spill_bytes, 12);
  EXPECT_EQ(parse_resource_use(log, "other").losses, "");
}

TEST(ResourceReport, KeepsEveryNoteOfLostPerformance) {
  const std::string log =
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
      "serialized due to the presence of Extern calls in the function 'fovea_kernel'\n"
      "ptxas info    : Compiling entry function 'fovea_kernel' for 'sm_90a'\n"
      "ptxas info    : Used 203 registers, used 1 barriers, 400 bytes smem\n"
      "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored.";
  const ResourceUse use = parse_resource_use(log, "fovea_kernel");
  EXPECT_EQ(use.registers, 203);
  EXPECT_EQ(use.losses,
            "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due "
            "to the presence of Extern calls in the function 'fovea_kernel'\n"
            "(C7508) Potential Performance Loss: 'setmaxnreg' ignored.");
}

std::vector<std::string> included(const std::string& text) {
  std::vector<std::string> names;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#include \"")) names.push_back(line.substr(10, line.find('"', 10) - 10));
  }
  return names;
}

bool has(const kernels::cuda::Family& family, const std::string& header) {
  return std::ranges::any_of(family.headers->texts(),
                             [&](const auto& each) { return each.first == header; });
}

TEST(Families, EveryBakedKernelHasItsSources) {
  using namespace kernels::cuda;
  EXPECT_FALSE(families().empty());
  for (const Family& family : families()) {
    for (const VariantValues& values : family.baked) {
      const KernelVariant variant = make_variant(family, values, family.sms.front());
      EXPECT_EQ(variant.headers, family.headers) << variant.name << " hashes its sources anew";
      EXPECT_NE(variant.program.find("Config<" + values.front()), std::string::npos);
      for (const std::string& name : included(variant.program)) {
        EXPECT_TRUE(has(family, name)) << variant.name << ": " << name;
      }
    }
    for (const auto& [name, text] : family.headers->texts()) {
      for (const std::string& other : included(text)) {
        EXPECT_TRUE(has(family, other)) << family.folder << ": " << other << " of " << name;
      }
    }
  }
  EXPECT_THROW(family("nothing/here"), Error);
}

}  // namespace
}  // namespace fovea::gpu
