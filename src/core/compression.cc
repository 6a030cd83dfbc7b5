// SPDX-License-Identifier: Apache-2.0
#include "core/compression.h"

#include <zstd.h>

#include <memory>

#include "core/check.h"

namespace fovea {
namespace {

// Compared with level 9, kernel packs are smaller by a twelfth and their builds longer by a
// fiftieth. Higher levels gain less than a hundredth (2026-11-30).
constexpr int kLevel = 17;

// These calls fail only if memory runs out.
size_t require(size_t result) {
  if (ZSTD_isError(result)) {
    fail(ErrorCode::out_of_memory, "zstd: {}", ZSTD_getErrorName(result));
  }
  return result;
}

}  // namespace

std::string compress(std::string_view bytes) {
  const std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> context(ZSTD_createCCtx(),
                                                                   ZSTD_freeCCtx);
  if (!context) fail(ErrorCode::out_of_memory, "zstd: no memory for a context");
  require(ZSTD_CCtx_setParameter(context.get(), ZSTD_c_compressionLevel, kLevel));
  require(ZSTD_CCtx_setParameter(context.get(), ZSTD_c_checksumFlag, 1));
  std::string frame(ZSTD_compressBound(bytes.size()), '\0');
  frame.resize(require(
      ZSTD_compress2(context.get(), frame.data(), frame.size(), bytes.data(), bytes.size())));
  return frame;
}

std::string decompress(std::string_view frame, size_t size, std::string_view what) {
  // Error codes are larger than any possible size.
  const unsigned long long frame_size = ZSTD_getFrameContentSize(frame.data(), frame.size());
  const size_t frame_bytes = ZSTD_findFrameCompressedSize(frame.data(), frame.size());
  if (frame_size >= ZSTD_CONTENTSIZE_ERROR || frame_bytes != frame.size()) {
    fail(ErrorCode::corrupt_file, "{}: its {} bytes are not one zstd frame", what, frame.size());
  }
  if (frame_size != size) {
    fail(ErrorCode::corrupt_file, "{}: {} bytes where its zstd frame has {}", what, size,
         frame_size);
  }
  std::string bytes(size, '\0');
  const size_t written = ZSTD_decompress(bytes.data(), size, frame.data(), frame.size());
  if (ZSTD_isError(written)) {
    fail(ErrorCode::corrupt_file, "{}: {}", what, ZSTD_getErrorName(written));
  }
  return bytes;
}

}  // namespace fovea
