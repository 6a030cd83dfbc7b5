// SPDX-License-Identifier: Apache-2.0
// A stand-in for NCCL: its functions over host memory, for ranks that are threads of one process.
// Streams are ignored. It refuses what NCCL refuses of what Fovea could get wrong: types,
// operators, and groups that are not an exchange between all ranks. A communicator that does not
// block joins in the background, and so does its first collective. With FOVEA_OLD_NCCL all block.
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "dist/nccl_library.h"
#include "fovea/error.h"

namespace {

using fovea::Communicator;
using fovea::DType;
using fovea::NcclId;
using fovea::ReduceOp;
using fovea::Stream;

constexpr int kSystemError = 2, kInvalidArgument = 4, kRemoteError = 6, kInProgress = 7;

struct Operation {
  bool sends = false;
  void* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

struct Rank {
  std::unique_ptr<Communicator> ranks;
  std::vector<Operation> group = {};
  int number = 0;  // its group
  bool blocks = true;
  bool is_late = false;  // the next collective ends in the background
  int late_result = 0;
};

std::mutex mutex;
int next_id = 1;
std::map<int, std::vector<std::unique_ptr<Communicator>>> groups;
std::map<int, int> joined;  // ranks of each group
thread_local bool in_group = false;
thread_local Rank* group_rank = nullptr;

Rank& rank_of(void* comm) { return *static_cast<Rank*>(comm); }

template <typename Body>
int result_of(const Body& body) {
  try {
    body();
    return 0;
  } catch (const fovea::Error&) {
    return kRemoteError;
  }
}

template <typename Body>
int collective(Rank& rank, const Body& body) {
  const int result = result_of([&] { body(*rank.ranks); });
  if (!std::exchange(rank.is_late, false)) return result;
  rank.late_result = result;
  return kInProgress;
}

bool parse(int type, int op, DType& dtype, ReduceOp& parsed) {
  const std::map<int, DType> types = {
      {2, DType::i32}, {4, DType::i64}, {6, DType::f16}, {7, DType::f32}, {9, DType::bf16}};
  if (!types.contains(type) || (op != 0 && op != 2)) return false;
  dtype = types.at(type);
  parsed = op == 0 ? ReduceOp::sum : ReduceOp::max;
  return true;
}

}  // namespace

#define FAKE extern "C" [[gnu::visibility("default")]]

FAKE int ncclGetUniqueId(NcclId* id) {
  const std::lock_guard lock(mutex);
  std::memcpy(id->bytes.data(), &next_id, sizeof(next_id));
  ++next_id;
  return 0;
}

namespace {

int init(void** comm, int size, NcclId id, int rank, bool blocks) {
  int number = 0;
  std::memcpy(&number, id.bytes.data(), sizeof(number));
  const std::lock_guard lock(mutex);
  if (number < 1 || number >= next_id) return kInvalidArgument;
  auto& group = groups[number];
  if (group.empty()) group = fovea::make_thread_communicators(size);
  if (group.size() != static_cast<size_t>(size)) return kInvalidArgument;
  *comm = new Rank{.ranks = std::move(group[static_cast<size_t>(rank)]),
                   .number = number,
                   .blocks = blocks,
                   .is_late = !blocks};
  ++joined[number];
  return blocks ? 0 : kInProgress;
}

}  // namespace

FAKE int ncclCommInitRank(void** comm, int size, NcclId id, int rank) {
  return init(comm, size, id, rank, true);
}
#ifndef FOVEA_OLD_NCCL
FAKE int ncclCommInitRankConfig(void** comm, int size, NcclId id, int rank,
                                const fovea::nccl::Config* config) {
  if (config->bytes != 24 || config->magic != 0xcafebeef || config->version != 21400) {
    return kInvalidArgument;
  }
  if (config->blocking != 0) return kInvalidArgument;  // Fovea has no use for it
  return init(comm, size, id, rank, false);
}
#endif

FAKE int ncclCommCount(void* comm, int* size) {
  *size = rank_of(comm).ranks->size();
  return 0;
}
FAKE int ncclCommUserRank(void* comm, int* rank) {
  *rank = rank_of(comm).ranks->rank();
  return 0;
}
FAKE int ncclCommGetAsyncError(void* comm, int* error) {
  Rank& rank = rank_of(comm);
  const std::lock_guard lock(mutex);
  if (!rank.blocks && joined[rank.number] < rank.ranks->size()) {
    *error = kInProgress;
    return 0;
  }
  *error = std::exchange(rank.late_result, 0);
  if (*error == 0) *error = result_of([&] { rank.ranks->check(); });
  return 0;
}
FAKE int ncclCommAbort(void* comm) {
  rank_of(comm).ranks->abort("aborted");
  delete &rank_of(comm);
  return 0;
}
FAKE int ncclCommDestroy(void* comm) {
  delete &rank_of(comm);
  return 0;
}
FAKE const char* ncclGetErrorString(int error) {
  return error == kInvalidArgument ? "invalid argument"
         : error == kRemoteError   ? "remote process exited or there was a network error"
                                   : "unknown";
}

// NCCL's two reductions, which have the same parameters.
#define FAKE_REDUCTION(name, method)                                                         \
  FAKE int name(const void* send, void* receive, size_t count, int type, int op, void* comm, \
                Stream) {                                                                    \
    DType dtype;                                                                             \
    ReduceOp parsed;                                                                         \
    if (!parse(type, op, dtype, parsed)) return kInvalidArgument;                            \
    return collective(rank_of(comm), [&](Communicator& ranks) {                              \
      ranks.method(send, receive, static_cast<int64_t>(count), dtype, parsed);               \
    });                                                                                      \
  }
FAKE_REDUCTION(ncclAllReduce, all_reduce)
FAKE_REDUCTION(ncclReduceScatter, reduce_scatter)

FAKE int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm,
                       Stream) {
  if (type != 0) return kInvalidArgument;
  return collective(rank_of(comm),
                    [&](Communicator& ranks) { ranks.all_gather(send, receive, count); });
}
// Fovea broadcasts in place.
#define FAKE_BROADCAST(name)                                                                   \
  FAKE int name(const void* send, void* receive, size_t count, int type, int root, void* comm, \
                Stream) {                                                                      \
    if (type != 0 || send != receive) return kInvalidArgument;                                 \
    return collective(rank_of(comm),                                                           \
                      [&](Communicator& ranks) { ranks.broadcast(receive, count, root); });    \
  }
FAKE_BROADCAST(ncclBroadcast)

FAKE int ncclGroupStart() {
  if (in_group) return kSystemError;
  in_group = true;
  group_rank = nullptr;
  return 0;
}
FAKE int ncclSend(const void* data, size_t count, int type, int peer, void* comm, Stream) {
  if (!in_group || type != 0) return kInvalidArgument;
  group_rank = &rank_of(comm);
  group_rank->group.push_back({true, const_cast<void*>(data), count, peer});
  return 0;
}
FAKE int ncclRecv(void* data, size_t count, int type, int peer, void* comm, Stream) {
  if (!in_group || type != 0) return kInvalidArgument;
  group_rank = &rank_of(comm);
  group_rank->group.push_back({false, data, count, peer});
  return 0;
}
FAKE int ncclGroupEnd() {
  if (!in_group || group_rank == nullptr) return kSystemError;
  in_group = false;
  Rank& own = *group_rank;
  const auto size = static_cast<size_t>(own.ranks->size());
  const std::vector<Operation> group = std::exchange(own.group, {});
  if (group.size() != 2 * size) return kInvalidArgument;
  const size_t bytes = group[0].bytes;
  std::vector<char> send(size * bytes + 1), receive(size * bytes + 1);
  for (const Operation& operation : group) {
    if (operation.bytes != bytes) return kInvalidArgument;
    char* const part = send.data() + static_cast<size_t>(operation.peer) * bytes;
    if (operation.sends && bytes > 0) std::memcpy(part, operation.data, bytes);
  }
  const int result = collective(
      own, [&](Communicator& ranks) { ranks.all_to_all(send.data(), receive.data(), bytes); });
  for (const Operation& operation : group) {
    const char* const part = receive.data() + static_cast<size_t>(operation.peer) * bytes;
    if (!operation.sends && bytes > 0) std::memcpy(operation.data, part, bytes);
  }
  return result;
}
