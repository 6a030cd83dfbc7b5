// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/speculation.h"

#include "attention/draft_params.h"
#include "attention/row_pieces.h"
#include "attention/validate/drafts.h"
#include "core/check.h"
#include "gpu/gpu.h"
#include "kernels/cuda/portable/speculation/launch.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

constexpr int32_t kMaxPieceBytes = 1024;   // 16 bytes per lane, twice
constexpr int64_t kMaxPieces = 8 * 65535;  // eight in each row of the grid

class CudaSpeculation final : public Speculation {
 public:
  CudaSpeculation(const SpeculationLimits& limits, std::span<KvPool* const> pools, Device device)
      : limits_(limits),
        context_(device.index),
        kernels_((context_.bind(), context_.info().sm), cuda::kernel_store()) {
    const std::vector<kernels::RowPiece> pieces = row_pieces(pools, kMaxPieceBytes);
    if (static_cast<int64_t>(pieces.size()) > kMaxPieces) {
      fail(ErrorCode::unsupported, "a token of these pools has {} pieces of {} bytes, at most {}",
           pieces.size(), kMaxPieceBytes, kMaxPieces);
    }
    if (!pieces.empty()) pieces_ = gpu::to_device(pieces, nullptr);
    const auto requests = static_cast<size_t>(limits.max_requests);
    sums_ = gpu::DeviceBuffer(requests * kernels::kSumTiles * sizeof(double));
    arrived_ = gpu::to_device(std::vector<uint32_t>(requests), nullptr);
  }
  ~CudaSpeculation() override { context_.bind_to_free(); }

  void describe(const Drafts& drafts, const DraftPlaces& places, const DraftArrays& arrays,
                Stream stream) override {
    check_drafts(drafts, limits_);
    check_describe(drafts, places, arrays);
    context_.bind();
    kernels_.describe(describe_params(drafts, places, arrays), stream);
  }

  void accept(const Drafts& drafts, const TargetTokens& target, const AcceptedDrafts& accepted,
              Stream stream) override {
    check_drafts(drafts, limits_);
    check_accept(drafts, target, accepted);
    context_.bind();
    kernels_.accept(accept_params(drafts, target, accepted), stream);
  }

  void accept(const Drafts& drafts, const TargetProbabilities& target,
              const AcceptedDrafts& accepted, Stream stream) override {
    check_drafts(drafts, limits_);
    check_accept(drafts, target, accepted);
    context_.bind();
    kernels::AcceptSampledParams params = accept_params(drafts, target, accepted);
    params.sums = {sums_.data<double>(), arrived_.data<uint32_t>()};
    kernels_.accept(params, context_.info().cores, stream);
  }

  void commit(const Drafts& drafts, const DraftArrays& arrays, const AcceptedDrafts& accepted,
              const CommittedArrays& committed, Stream stream) override {
    check_drafts(drafts, limits_);
    check_commit(drafts, arrays, accepted, committed);
    context_.bind();
    kernels_.commit(
        commit_params(drafts, arrays, accepted, committed, pieces_.span<const kernels::RowPiece>()),
        stream);
  }

 private:
  const SpeculationLimits limits_;
  const gpu::Context context_;
  const cuda::DraftKernels kernels_;
  gpu::DeviceBuffer pieces_;
  gpu::DeviceBuffer sums_, arrived_;  // kernels::PartSums
};

}  // namespace

std::unique_ptr<Speculation> make_cuda_speculation(const SpeculationLimits& limits,
                                                   std::span<KvPool* const> pools, Device device) {
  return std::make_unique<CudaSpeculation>(limits, pools, device);
}

}  // namespace fovea
