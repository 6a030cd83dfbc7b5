// SPDX-License-Identifier: Apache-2.0
#include "engine/masked_draws.h"

#include <cstring>

#include "core/check.h"

namespace fovea {

namespace cuda = kernels::cuda;

namespace {

size_t mask_bytes(int32_t bits) { return (static_cast<size_t>(bits) + 63) / 64 * sizeof(uint64_t); }

}  // namespace

size_t MaskedDraws::bytes(int32_t max_draws, int32_t bits) {
  if (bits == 0) return 0;
  return static_cast<size_t>(max_draws) * (sizeof(cuda::Draw) + mask_bytes(bits));
}

MaskedDraws::MaskedDraws(int32_t max_draws, int32_t bits) {
  if (bits == 0) return;
  max_draws_ = static_cast<size_t>(max_draws);
  mask_bytes_ = mask_bytes(bits);
  list_.reserve(max_draws_);
  pinned_ = gpu::PinnedBuffer(bytes(max_draws, bits));
  buffer_ = gpu::DeviceBuffer(bytes(max_draws, bits));
}

void MaskedDraws::clear() {
  list_.clear();
  waiting_ = 0;
}

void MaskedDraws::add(const cuda::Draw& draw) {
  check_argument(draw.row < 0 || max_draws_ > 0, "the runner was made without masked draws");
  if (max_draws_ == 0) return;
  check_argument(list_.size() < max_draws_, "a pass draws more than {} tokens", max_draws_);
  list_.push_back(draw);
  waiting_ += draw.row >= 0;
}

void MaskedDraws::upload(std::span<const grammar::TokenMask> masks, Stream stream) {
  std::byte* const bytes = pinned_.data<std::byte>();
  size_t next = 0, used = 0;
  for (cuda::Draw& draw : list_) {
    if (draw.row < 0) continue;
    const grammar::TokenMask& mask = masks[next++];
    if (mask.empty()) continue;
    check_argument(mask.size() * sizeof(uint64_t) == mask_bytes_,
                   "a mask has {} words, must have {}", mask.size(),
                   mask_bytes_ / sizeof(uint64_t));
    draw.mask = static_cast<int32_t>(used);
    std::memcpy(bytes + list_bytes() + used++ * mask_bytes_, mask.data(), mask_bytes_);
  }
  std::memcpy(bytes, list_.data(), list_.size() * sizeof(cuda::Draw));
  gpu::copy_to_device(buffer_.data(), bytes, list_bytes() + used * mask_bytes_, stream);
}

void MaskedDraws::set(size_t first, cuda::DrawParams& params) const {
  params.draws = buffer_.data<cuda::Draw>() + first;
  params.masks = reinterpret_cast<const uint32_t*>(buffer_.data<std::byte>() + list_bytes());
  params.mask_words = static_cast<int64_t>(mask_bytes_ / sizeof(uint32_t));
}

}  // namespace fovea
