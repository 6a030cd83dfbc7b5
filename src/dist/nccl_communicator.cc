// SPDX-License-Identifier: Apache-2.0
#include "fovea/nccl_communicator.h"

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/check_device.h"
#include "dist/connection.h"
#include "dist/nccl_library.h"
#include "gpu/gpu.h"

namespace fovea {
namespace {

using nccl::Library;
using nccl::Result;

void check_result(const Library& library, Result result, std::string_view call) {
  if (result == nccl::kSuccess || result == nccl::kInProgress) return;
  fail(ErrorCode::device_failure, "nccl: {} returned {}, {}", call, result,
       library.error_text(result));
}

int type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return nccl::kFloat32;
    case DType::f16:
      return nccl::kFloat16;
    case DType::bf16:
      return nccl::kBfloat16;
    case DType::i32:
      return nccl::kInt32;
    default:
      return nccl::kInt64;  // the communicator accepts no others
  }
}

int op_of(ReduceOp op) { return op == ReduceOp::sum ? nccl::kSum : nccl::kMax; }

// Waits until a call that goes on in the background has ended. Returns its result, or kInProgress
// at the deadline.
Result wait_for(const Library& library, nccl::Comm comm, Result result, Deadline end) {
  constexpr std::chrono::milliseconds kPause{1};
  while (result == nccl::kInProgress && std::chrono::steady_clock::now() < end) {
    const Result asked = library.async_error(comm, &result);
    if (asked != nccl::kSuccess) return asked;
    if (result == nccl::kInProgress) std::this_thread::sleep_for(kPause);
  }
  return result;
}

// The context of the table of functions.
struct NcclRanks {
  std::shared_ptr<const Library> calls;
  nccl::Comm comm = nullptr;
  int size = 1;
  Device device;
  bool owned = false;
  void* barrier_memory = nullptr;
  std::optional<gpu::DeviceBuffer> barrier_buffer = {};
  bool aborted = false;
  std::chrono::milliseconds timeout{};

  // A call of a communicator that does not block may first connect ranks in the background.
  Result ended(Result result) const { return wait_for(*calls, comm, result, after(timeout)); }

  int all_to_all(const void* send, void* receive, size_t bytes, Stream stream) const {
    Result result = calls->group_start();
    for (int rank = 0; rank < size && result == nccl::kSuccess; ++rank) {
      const size_t offset = static_cast<size_t>(rank) * bytes;
      result = calls->send(static_cast<const char*>(send) + offset, bytes, nccl::kBytes, rank, comm,
                           stream);
      if (result != nccl::kSuccess) break;
      result = calls->receive(static_cast<char*>(receive) + offset, bytes, nccl::kBytes, rank, comm,
                              stream);
    }
    const Result end = ended(calls->group_end());
    return result != nccl::kSuccess ? result : end;
  }
  int barrier(Stream stream) {
    if (barrier_memory == nullptr) {
      const gpu::Context context(device.index);
      context.bind();
      barrier_memory = barrier_buffer.emplace(sizeof(int32_t)).data();
    }
    return ended(calls->all_reduce(barrier_memory, barrier_memory, 1, nccl::kInt32, nccl::kMax,
                                   comm, stream));
  }
};

NcclRanks& ranks_of(void* context) { return *static_cast<NcclRanks*>(context); }

void set_collectives(CommunicatorFunctions& table) {
  table.all_reduce = [](void* context, const void* send, void* receive, int64_t count, DType dtype,
                        ReduceOp op, Stream stream) {
    const NcclRanks& own = ranks_of(context);
    return own.ended(own.calls->all_reduce(send, receive, static_cast<size_t>(count),
                                           type_of(dtype), op_of(op), own.comm, stream));
  };
  table.reduce_scatter = [](void* context, const void* send, void* receive, int64_t count,
                            DType dtype, ReduceOp op, Stream stream) {
    const NcclRanks& own = ranks_of(context);
    return own.ended(own.calls->reduce_scatter(send, receive, static_cast<size_t>(count),
                                               type_of(dtype), op_of(op), own.comm, stream));
  };
  table.all_gather = [](void* context, const void* send, void* receive, size_t bytes,
                        Stream stream) {
    const NcclRanks& own = ranks_of(context);
    return own.ended(own.calls->all_gather(send, receive, bytes, nccl::kBytes, own.comm, stream));
  };
  table.all_to_all = [](void* context, const void* send, void* receive, size_t bytes,
                        Stream stream) {
    return ranks_of(context).all_to_all(send, receive, bytes, stream);
  };
  table.broadcast = [](void* context, void* data, size_t bytes, int root, Stream stream) {
    const NcclRanks& own = ranks_of(context);
    return own.ended(own.calls->broadcast(data, data, bytes, nccl::kBytes, root, own.comm, stream));
  };
  table.barrier = [](void* context, Stream stream) { return ranks_of(context).barrier(stream); };
}

// ncclCommAbort ends waiting kernels at once, but returns only when all graphs with calls of the
// communicator are destroyed, for which the caller may have to go on first.
void abort_meanwhile(std::shared_ptr<const Library> calls, nccl::Comm comm) {
  constexpr std::chrono::seconds kUsual{1};
  std::promise<void> ended;
  const std::future<void> end = ended.get_future();
  std::thread([calls = std::move(calls), comm, ended = std::move(ended)]() mutable {
    calls->abort(comm);
    ended.set_value();
  }).detach();
  end.wait_for(kUsual);
}

void set_errors(CommunicatorFunctions& table) {
  table.async_error = [](void* context) {
    const NcclRanks& own = ranks_of(context);
    Result result = nccl::kSuccess;
    const Result asked = own.calls->async_error(own.comm, &result);
    if (asked != nccl::kSuccess) return asked;
    return result == nccl::kInProgress ? nccl::kSuccess : result;
  };
  // A caller's ncclComm_t stays valid: its owner aborts it.
  table.abort = [](void* context) {
    NcclRanks& own = ranks_of(context);
    if (own.owned) abort_meanwhile(own.calls, own.comm);
    own.aborted = true;
  };
  table.describe = [](void* context, int error) {
    return ranks_of(context).calls->error_text(error);
  };
  table.destroy = [](void* context) {
    const std::unique_ptr<NcclRanks> own(static_cast<NcclRanks*>(context));
    if (own->owned && !own->aborted) own->calls->destroy(own->comm);
  };
}

std::unique_ptr<Communicator> make_over(std::unique_ptr<NcclRanks> ranks, int rank) {
  CommunicatorFunctions table;
  table.name = "nccl";
  table.rank = rank;
  table.size = ranks->size;
  table.device = DeviceKind::cuda;
  table.capturable = true;
  table.context = ranks.get();
  set_collectives(table);
  set_errors(table);
  auto communicator = make_communicator(table);
  (void)ranks.release();  // table.destroy frees it
  return communicator;
}

// Joins the group. The rank that died cannot be named: NCCL knows only that not all are there.
void join(NcclRanks& ranks, const NcclId& id, int rank) {
  const Library& calls = *ranks.calls;
  if (calls.init_rank_config == nullptr) {
    return check_result(calls, calls.init_rank(&ranks.comm, ranks.size, id, rank),
                        "ncclCommInitRank");
  }
  const Deadline end = after(ranks.timeout);
  nccl::Config config;
  Result result = calls.init_rank_config(&ranks.comm, ranks.size, id, rank, &config);
  if (ranks.comm != nullptr) result = wait_for(calls, ranks.comm, result, end);
  if (result == nccl::kSuccess) return;
  if (ranks.comm != nullptr) abort_meanwhile(ranks.calls, ranks.comm);
  if (result == nccl::kInProgress) {
    fail(ErrorCode::device_failure,
         "nccl: rank {} of {} has waited for {:g} s, and not all others have joined", rank,
         ranks.size, std::chrono::duration<double>(ranks.timeout).count());
  }
  check_result(calls, result, "ncclCommInitRankConfig");
}

void check_gpu(Device device) {
  check_device(device, "device");
  check_argument(device.kind == DeviceKind::cuda, "device is {}, must be a GPU",
                 device_name(device));
}

}  // namespace

NcclId make_nccl_id(const NcclOptions& options) {
  const auto library = nccl::load(options.path);
  NcclId id;
  check_result(*library, library->get_unique_id(&id), "ncclGetUniqueId");
  return id;
}

std::unique_ptr<Communicator> make_nccl_communicator(const NcclId& id, int rank, int size,
                                                     Device device, const NcclOptions& options) {
  check_gpu(device);
  check_argument(size > 0, "size is {}, must be positive", size);
  check_argument(rank >= 0 && rank < size, "rank is {}, must be in [0, {})", rank, size);
  check_argument(options.timeout.count() > 0, "timeout is {} ms, must be positive",
                 options.timeout.count());
  auto ranks = std::make_unique<NcclRanks>();
  ranks->calls = nccl::load(options.path);
  ranks->size = size;
  ranks->device = device;
  ranks->owned = true;
  ranks->timeout = options.timeout;
  ranks->barrier_memory = options.barrier_memory;
  std::optional<gpu::Context> context;
  if (options.barrier_memory == nullptr) context.emplace(device.index).bind();
  join(*ranks, id, rank);
  return make_over(std::move(ranks), rank);
}

std::unique_ptr<Communicator> wrap_nccl_communicator(void* comm, Device device,
                                                     const NcclOptions& options) {
  check_gpu(device);
  check_argument(comm != nullptr, "comm is null");
  auto ranks = std::make_unique<NcclRanks>();
  ranks->calls = nccl::load(options.path);
  ranks->comm = comm;
  ranks->device = device;
  ranks->barrier_memory = options.barrier_memory;
  int rank = 0;
  check_result(*ranks->calls, ranks->calls->count(comm, &ranks->size), "ncclCommCount");
  check_result(*ranks->calls, ranks->calls->user_rank(comm, &rank), "ncclCommUserRank");
  return make_over(std::move(ranks), rank);
}

}  // namespace fovea
