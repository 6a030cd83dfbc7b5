// SPDX-License-Identifier: Apache-2.0
// A suite of tests over kernels of the first GPU. It is skipped if there is no GPU or another
// architecture.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "fovea/gpu.h"
#include "gpu/gpu.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel.h"

namespace fovea::test {

// Base: ::testing::Test or TestWithParam. kSm: the only architecture the kernels run on, 0: any.
template <typename Base, int kSm = 0>
class GpuKernelTest : public Base {
 protected:
  static void SetUpTestSuite() {
    if (!why_no_gpu().empty()) return;
    context = std::make_unique<gpu::Context>(0);
    const char* pack = std::getenv("FOVEA_KERNEL_PACK");
    store =
        std::make_unique<gpu::KernelStore>(gpu::KernelStoreOptions{.pack_path = pack ? pack : ""});
  }
  static void TearDownTestSuite() {
    store.reset();
    context.reset();
  }
  void SetUp() override {
    if (!context) GTEST_SKIP() << why_no_gpu();
    const int sm = context->info().sm;
    if (kSm != 0 && sm != kSm) GTEST_SKIP() << "the GPU is sm_" << sm << ", not sm_" << kSm;
    context->bind();
  }
  static kernels::cuda::Kernel load(std::string_view folder,
                                    const kernels::cuda::VariantValues& values) {
    using namespace kernels::cuda;
    return Kernel(make_variant(family(folder), values, context->info().sm), *store);
  }

  static inline std::unique_ptr<gpu::Context> context;
  static inline std::unique_ptr<gpu::KernelStore> store;
};

}  // namespace fovea::test
