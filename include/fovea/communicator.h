// SPDX-License-Identifier: Apache-2.0
// Collectives between ranks: the parts of a model or of a context that run side by side, as threads
// of one process, as processes, or on several GPUs.
//
// Every rank has a Communicator of its own and makes the same calls in the same order, with equal
// sizes. A sum has the same bits on all ranks and in every run of `self` and `threads`, which add
// in the order of the ranks; 16-bit types are summed in fp32 and rounded once.
//
// Failure: a rank that dies, hangs or calls something else gives every other rank an Error within
// the timeout of its communicator. From then on every call throws the same reason at once.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/api.h"
#include "fovea/device.h"
#include "fovea/dtype.h"

namespace FOVEA_API fovea {

enum class ReduceOp : uint8_t { sum, max };  // the max of values with a NaN is NaN

// On the CPU a call has finished when it returns. On a GPU it is enqueued on `stream`. Buffers
// belong to the caller. Arrays of 0 elements may be null. Calls on one object must not overlap,
// except for abort().
//
// All calls throw Error{invalid_argument} naming the argument that is absent, out of range or
// overlapping, and Error{device_failure} with the reason if a rank has failed.
class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual std::string_view name() const = 0;                               // "self", "threads", ...
  virtual DeviceKind device() const { return DeviceKind::cpu; }            // where the buffers are
  virtual bool capturable() const { return device() == DeviceKind::cpu; }  // inside CUDA graphs

  // receive[i] = op over all ranks of send[i]; both are [count] of fp32, fp16, bf16, i32 or i64.
  // They may be the same array.
  void all_reduce(const void* send, void* receive, int64_t count, DType dtype, ReduceOp op,
                  Stream stream = nullptr);
  // receive[i] = op over all ranks of send[rank() * count + i]; send is [size(), count], receive
  // [count]. receive may be this rank's part of send.
  void reduce_scatter(const void* send, void* receive, int64_t count, DType dtype, ReduceOp op,
                      Stream stream = nullptr);
  // receive[r] = the `bytes` bytes that rank r sends; receive is [size(), bytes]. send may be this
  // rank's part of receive.
  void all_gather(const void* send, void* receive, size_t bytes, Stream stream = nullptr);
  // receive[r] = part rank() of what rank r sends; both are [size(), bytes] and do not overlap.
  void all_to_all(const void* send, void* receive, size_t bytes, Stream stream = nullptr);
  // Copies `data` of rank `root` to all ranks.
  void broadcast(void* data, size_t bytes, int root, Stream stream = nullptr);
  // Nothing after it, in stream order, begins on any rank before all ranks have reached it.
  void barrier(Stream stream = nullptr);

  // Fails the communicator on all ranks: waiting calls and all later ones throw `reason`. May be
  // called from any thread; the first reason stays.
  virtual void abort(std::string_view reason) = 0;
  // Throws Error{device_failure} if a rank has failed, without waiting for anything.
  virtual void check() = 0;
  // Later calls of this rank wait for others for as long as this. Only communicators between
  // processes on the CPU let it be changed; others ignore it.
  virtual void set_timeout(std::chrono::milliseconds) {}

 protected:
  Communicator(int rank, int size);

  // Arguments that have been checked.
  struct Reduction {
    const void* send = nullptr;
    void* receive = nullptr;
    int64_t count = 0;
    DType dtype = DType::f32;
    ReduceOp op = ReduceOp::sum;
  };
  struct Exchange {
    const void* send = nullptr;
    void* receive = nullptr;
    size_t bytes = 0;
  };
  virtual void run_all_reduce(const Reduction& call, Stream stream) = 0;
  virtual void run_reduce_scatter(const Reduction& call, Stream stream) = 0;
  virtual void run_all_gather(const Exchange& call, Stream stream) = 0;
  virtual void run_all_to_all(const Exchange& call, Stream stream) = 0;
  virtual void run_broadcast(void* data, size_t bytes, int root, Stream stream) = 0;
  virtual void run_barrier(Stream stream) = 0;

 private:
  void check_stream(Stream stream) const;
  void check_reduction(const Reduction& call, size_t send_parts) const;

  int rank_, size_;
};

// Returns the communicator of a single rank, on the CPU.
std::unique_ptr<Communicator> make_self_communicator();

struct ThreadCommunicatorOptions {
  // A rank fails that another one has waited for as long as this, which is positive.
  std::chrono::milliseconds timeout{10'000};
  // For tests: called by every rank before its call number `call` (from 0) arrives, and after all
  // ranks have arrived, before it copies. They may sleep. An exception from `arrive` or `copy`
  // fails the communicator and leaves the rank's call.
  std::function<void(int rank, int64_t call)> arrive = {};
  std::function<void(int rank, int64_t call)> copy = {};
};

// Returns the communicators of `ranks` threads of this process, in [1, 1024], one for each. They
// share their state, which the last one destroys; a rank whose communicator is destroyed has left,
// and calls that wait for it fail. Streams must be null.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int ranks, const ThreadCommunicatorOptions& options = {});

// A caller's own collectives, for example those of MPI (mpi_communicator.h) or of a framework. Each
// function gets `context` first, arguments that have been checked, and returns 0 or an error number
// of its own. Functions may be null only if their comment says so.
struct CommunicatorFunctions {
  std::string name = "functions";
  int rank = 0, size = 1;
  DeviceKind device = DeviceKind::cpu;
  bool capturable = false;
  void* context = nullptr;

  // Both are optional on the CPU: without them, arrays are exchanged by all_gather and all_to_all
  // and added in the order of the ranks.
  int (*all_reduce)(void* context, const void* send, void* receive, int64_t count, DType dtype,
                    ReduceOp op, Stream stream) = nullptr;
  int (*reduce_scatter)(void* context, const void* send, void* receive, int64_t count, DType dtype,
                        ReduceOp op, Stream stream) = nullptr;
  int (*all_gather)(void* context, const void* send, void* receive, size_t bytes,
                    Stream stream) = nullptr;
  int (*all_to_all)(void* context, const void* send, void* receive, size_t bytes,
                    Stream stream) = nullptr;
  int (*broadcast)(void* context, void* data, size_t bytes, int root, Stream stream) = nullptr;
  int (*barrier)(void* context, Stream stream) = nullptr;

  // Optional: ends calls that wait on any rank. Called after an error and by abort().
  void (*abort)(void* context) = nullptr;
  // Optional: returns the error number of calls that were enqueued, 0 if there is none.
  int (*async_error)(void* context) = nullptr;
  // Optional: see Communicator::set_timeout().
  void (*set_timeout)(void* context, std::chrono::milliseconds timeout) = nullptr;
  // Optional: the text of an error number, valid until the next call.
  const char* (*describe)(void* context, int error) = nullptr;
  void (*destroy)(void* context) = nullptr;  // optional
};

// Returns a communicator over the functions, which it owns: `destroy` runs with it. Throws
// Error{invalid_argument} naming the function that is null or the rank that is out of range.
std::unique_ptr<Communicator> make_communicator(CommunicatorFunctions functions);

}  // namespace fovea
