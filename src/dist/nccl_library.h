// SPDX-License-Identifier: Apache-2.0
// Loads NCCL's functions at run time.
#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <string>

#include "fovea/device.h"
#include "fovea/nccl_communicator.h"

namespace fovea::nccl {

// The used part of its binary interface (NCCL 2.7 and later), as in nccl.h; of what came later, it
// is null in older ones.
using Result = int;
using Comm = void*;
enum Type : int { kInt32 = 2, kInt64 = 4, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9, kBytes = 0 };
enum Op : int { kSum = 0, kMax = 2 };
constexpr Result kSuccess = 0, kInProgress = 7;

// The first version of ncclConfig_t, that of NCCL 2.14. Later ones take it, and their own defaults
// for what it lacks.
struct Config {
  size_t bytes = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
  int unused = INT_MIN;  // later versions read as many bytes as there are: "not set"
};

#define FOVEA_NCCL_FUNCTIONS(X)                                                                \
  X(get_unique_id, "ncclGetUniqueId", (NcclId*))                                               \
  X(init_rank, "ncclCommInitRank", (Comm*, int, NcclId, int))                                  \
  X(count, "ncclCommCount", (Comm, int*))                                                      \
  X(user_rank, "ncclCommUserRank", (Comm, int*))                                               \
  X(async_error, "ncclCommGetAsyncError", (Comm, Result*))                                     \
  X(abort, "ncclCommAbort", (Comm))                                                            \
  X(destroy, "ncclCommDestroy", (Comm))                                                        \
  X(all_reduce, "ncclAllReduce", (const void*, void*, size_t, int, int, Comm, Stream))         \
  X(reduce_scatter, "ncclReduceScatter", (const void*, void*, size_t, int, int, Comm, Stream)) \
  X(all_gather, "ncclAllGather", (const void*, void*, size_t, int, Comm, Stream))              \
  X(broadcast, "ncclBroadcast", (const void*, void*, size_t, int, int, Comm, Stream))          \
  X(send, "ncclSend", (const void*, size_t, int, int, Comm, Stream))                           \
  X(receive, "ncclRecv", (void*, size_t, int, int, Comm, Stream))                              \
  X(group_start, "ncclGroupStart", ())                                                         \
  X(group_end, "ncclGroupEnd", ())

struct Library {
#define FOVEA_DECLARE(member, name, parameters) Result(*member) parameters = nullptr;
  FOVEA_NCCL_FUNCTIONS(FOVEA_DECLARE)
#undef FOVEA_DECLARE
  const char* (*error_text)(Result) = nullptr;  // ncclGetErrorString
  // ncclCommInitRankConfig, from NCCL 2.14 on.
  Result (*init_rank_config)(Comm*, int, NcclId, int, Config*) = nullptr;
};

// Loads the library of this path, or the default one if it is empty, and keeps it. Throws
// Error{unsupported} with the reason.
std::shared_ptr<const Library> load(const std::string& path);

}  // namespace fovea::nccl
