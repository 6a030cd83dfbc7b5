// SPDX-License-Identifier: Apache-2.0
// Groups of launches that go to the GPU as one graph. Skipped without a GPU.
#include "gpu/launch.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "kernels/cuda/common/measure_params.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

constexpr int64_t kCount = 1 << 20;

// Counts the elements that are not finite in noise that the preceding kernel writes, so the order
// of the two shows.
class LaunchGroups : public test::GpuKernelTest<::testing::Test> {
 protected:
  void SetUp() override {
    GpuKernelTest::SetUp();
    if (IsSkipped()) return;
    noise = load("measure/noise", {"bf16"});
    not_finite = load("measure/not_finite", {"bf16"});
    values = gpu::DeviceBuffer(kCount * 2);
    found = to_device(std::vector<uint64_t>{0});
    owned = std::make_unique<gpu::OwnedStream>();
  }
  // Sets the first `bad` of `count` values to NaN, then counts them.
  void enqueue(int64_t bad, int64_t count, gpu::Launcher to) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    noise.launch({8}, NoiseParams{values.data(), count, count, count, 1, 0, 1}, to);
    noise.launch({8}, NoiseParams{values.data(), bad, count, count, 1, nan, 1}, to);
    not_finite.launch({8}, NotFiniteParams{values.data(), count, found.data<uint64_t>()}, to);
  }
  Stream stream() const { return owned->get(); }
  template <typename Work>
  void submit(Stream to, Work&& work) {
    work(group.collect(to));
    group.launch();
  }
  uint64_t counted() {
    const uint64_t all = to_host<uint64_t>(found, 1)[0];
    const uint64_t more = all - before;
    before = all;
    return more;
  }

  Kernel noise, not_finite;
  gpu::DeviceBuffer values, found;
  uint64_t before = 0;
  std::unique_ptr<gpu::OwnedStream> owned;
  gpu::LaunchGroup group;
};

TEST_F(LaunchGroups, RunInOrderWithTheParametersOfEachCall) {
  for (const int64_t bad : {3, 1000, 0, 77777}) {
    for (const int64_t count : {kCount, kCount / 2}) {
      for (int turn = 0; turn < 2; ++turn) {
        submit(stream(), [&](gpu::Launcher to) { enqueue(bad, count, to); });
        gpu::synchronize(stream());
        EXPECT_EQ(counted(), static_cast<uint64_t>(bad));
      }
    }
  }
  // Many groups in flight, each with parameters of its own.
  for (int64_t bad = 0; bad < 200; ++bad) {
    submit(stream(), [&](gpu::Launcher to) { enqueue(bad, kCount, to); });
  }
  gpu::synchronize(stream());
  EXPECT_EQ(counted(), 200u * 199 / 2);
}

TEST_F(LaunchGroups, OtherKernelsGetAnotherGraph) {
  for (int turn = 0; turn < 3; ++turn) {
    submit(stream(), [&](gpu::Launcher to) { enqueue(5, kCount, to); });
    submit(stream(), [&](gpu::Launcher to) {
      enqueue(6, kCount, to);
      enqueue(7, kCount, to);
    });
    gpu::synchronize(stream());
    EXPECT_EQ(counted(), 18u);
  }
}

TEST_F(LaunchGroups, TakeGridsOfEachCall) {
  enqueue(kCount, kCount, stream());  // all are NaN
  gpu::synchronize(stream());
  before = to_host<uint64_t>(found, 1)[0];
  // Two kernels that count the same values, then one kernel.
  for (const uint32_t blocks : {1u, 40u, 40u, 3u}) {
    for (const int64_t count : {kCount, int64_t{1000}, int64_t{1000}}) {
      for (const int kernels : {2, 1}) {
        submit(stream(), [&](gpu::Launcher to) {
          for (int i = 0; i < kernels; ++i) {
            not_finite.launch({blocks},
                              NotFiniteParams{values.data(), count, found.data<uint64_t>()}, to);
          }
        });
        gpu::synchronize(stream());
        EXPECT_EQ(counted(), static_cast<uint64_t>(kernels * count));
      }
    }
  }
}

TEST_F(LaunchGroups, FailedWorkEnqueuesNothing) {
  EXPECT_THROW(submit(stream(),
                      [&](gpu::Launcher to) {
                        enqueue(5, kCount, to);
                        throw std::runtime_error("refused");
                      }),
               std::runtime_error);
  gpu::synchronize(stream());
  EXPECT_EQ(counted(), 0u);
  submit(stream(), [&](gpu::Launcher to) { enqueue(9, kCount, to); });
  gpu::synchronize(stream());
  EXPECT_EQ(counted(), 9u);
}

TEST_F(LaunchGroups, BecomePartOfACapture) {
  const gpu::Graph graph = gpu::Graph::capture(stream(), [&](Stream captured) {
    submit(captured, [&](gpu::Launcher to) { enqueue(11, kCount, to); });
  });
  for (int turn = 0; turn < 2; ++turn) {
    graph.launch(stream());
    gpu::synchronize(stream());
    EXPECT_EQ(counted(), 11u);
  }
}

}  // namespace
}  // namespace fovea::kernels::cuda
