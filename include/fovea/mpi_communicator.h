// SPDX-License-Identifier: Apache-2.0
// A communicator over MPI, for programs that have it: header only, because implementations of MPI
// differ in their binary interface. Link with yours, and call MPI_Init_thread() first.
//
// Sums are made of exchanged arrays in the order of the ranks, so they have the bits of `threads`.
#pragma once

#include <mpi.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "fovea/communicator.h"

namespace fovea {

namespace detail {

// Buffers of a call are copies: MPI cannot cancel a collective, so after a timeout it may still
// write to them. They are then never freed.
class MpiRanks {
 public:
  static constexpr int kTimeout = -1, kTooLarge = -2;

  MpiRanks(MPI_Comm ranks, std::chrono::milliseconds timeout) : timeout_(timeout) {
    MPI_Comm_dup(ranks, &ranks_);
    MPI_Comm_set_errhandler(ranks_, MPI_ERRORS_RETURN);
    MPI_Comm_size(ranks_, &size_);
    MPI_Comm_rank(ranks_, &rank_);
  }
  ~MpiRanks() {
    if (buffers_ != nullptr) MPI_Comm_free(&ranks_);
  }
  MpiRanks(const MpiRanks&) = delete;
  MpiRanks& operator=(const MpiRanks&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool failed() const { return buffers_ == nullptr; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  int all_gather(const void* send, void* receive, size_t bytes) {
    if (bytes > INT_MAX) return kTooLarge;
    stage(send, bytes, bytes * ranks());
    MPI_Request request = MPI_REQUEST_NULL;
    const int error = MPI_Iallgather(buffers_->send.data(), static_cast<int>(bytes), MPI_BYTE,
                                     buffers_->receive.data(), static_cast<int>(bytes), MPI_BYTE,
                                     ranks_, &request);
    return finish(error, request, receive, bytes * ranks());
  }
  int all_to_all(const void* send, void* receive, size_t bytes) {
    if (bytes > INT_MAX) return kTooLarge;
    stage(send, bytes * ranks(), bytes * ranks());
    MPI_Request request = MPI_REQUEST_NULL;
    const int error = MPI_Ialltoall(buffers_->send.data(), static_cast<int>(bytes), MPI_BYTE,
                                    buffers_->receive.data(), static_cast<int>(bytes), MPI_BYTE,
                                    ranks_, &request);
    return finish(error, request, receive, bytes * ranks());
  }
  int broadcast(void* data, size_t bytes, int root) {
    if (bytes > INT_MAX) return kTooLarge;
    stage(data, 0, bytes);
    if (bytes > 0) std::memcpy(buffers_->receive.data(), data, bytes);
    MPI_Request request = MPI_REQUEST_NULL;
    const int error = MPI_Ibcast(buffers_->receive.data(), static_cast<int>(bytes), MPI_BYTE, root,
                                 ranks_, &request);
    return finish(error, request, data, bytes);
  }
  int barrier() {
    MPI_Request request = MPI_REQUEST_NULL;
    const int error = MPI_Ibarrier(ranks_, &request);
    return finish(error, request, nullptr, 0);
  }
  const char* describe(int error) {
    if (error == kTimeout) return "a rank did not come within the timeout";
    if (error == kTooLarge) return "MPI counts at most 2^31 - 1 bytes";
    int length = 0;
    MPI_Error_string(error, text_, &length);
    return text_;
  }

 private:
  struct Buffers {
    std::vector<char> send, receive;
  };

  size_t ranks() const { return static_cast<size_t>(size_); }
  // Copies what is sent. One byte more, so that no address is null.
  void stage(const void* send, size_t send_bytes, size_t receive_bytes) {
    if (buffers_->send.size() <= send_bytes) buffers_->send.resize(send_bytes + 1);
    if (buffers_->receive.size() <= receive_bytes) buffers_->receive.resize(receive_bytes + 1);
    if (send_bytes > 0) std::memcpy(buffers_->send.data(), send, send_bytes);
  }
  // Waits for the call and copies what was received.
  int finish(int error, MPI_Request request, void* receive, size_t bytes) {
    // A rank that waits for long leaves its core to others.
    constexpr std::chrono::milliseconds kBusy{50};
    constexpr std::chrono::microseconds kPause{100};
    const auto begin = std::chrono::steady_clock::now();
    const auto deadline = begin + timeout_;
    for (int done = 0, polls = 0; error == MPI_SUCCESS && done == 0; ++polls) {
      error = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done != 0 || polls < 1000) continue;
      const auto now = std::chrono::steady_clock::now();
      if (now > deadline) {
        error = kTimeout;
      } else if (now < begin + kBusy) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kPause);
      }
    }
    if (error != MPI_SUCCESS) {
      (void)buffers_.release();
    } else if (bytes > 0) {
      std::memcpy(receive, buffers_->receive.data(), bytes);
    }
    return error;
  }

  MPI_Comm ranks_ = MPI_COMM_NULL;
  std::chrono::milliseconds timeout_;
  int size_ = 1, rank_ = 0;
  std::unique_ptr<Buffers> buffers_ = std::make_unique<Buffers>();  // null after an error
  char text_[MPI_MAX_ERROR_STRING] = {};
};

}  // namespace detail

// Returns the calls of MpiRanks, which is their context and which the caller owns.
inline CommunicatorFunctions mpi_functions(detail::MpiRanks& owned) {
  using detail::MpiRanks;
  CommunicatorFunctions table;
  table.name = "mpi";
  table.rank = owned.rank();
  table.size = owned.size();
  table.context = &owned;
  table.all_gather = [](void* context, const void* send, void* receive, size_t bytes, Stream) {
    return static_cast<MpiRanks*>(context)->all_gather(send, receive, bytes);
  };
  table.all_to_all = [](void* context, const void* send, void* receive, size_t bytes, Stream) {
    return static_cast<MpiRanks*>(context)->all_to_all(send, receive, bytes);
  };
  table.broadcast = [](void* context, void* data, size_t bytes, int root, Stream) {
    return static_cast<MpiRanks*>(context)->broadcast(data, bytes, root);
  };
  table.barrier = [](void* context, Stream) { return static_cast<MpiRanks*>(context)->barrier(); };
  table.set_timeout = [](void* context, std::chrono::milliseconds timeout) {
    static_cast<MpiRanks*>(context)->set_timeout(timeout);
  };
  table.describe = [](void* context, int error) {
    return static_cast<MpiRanks*>(context)->describe(error);
  };
  return table;
}

// Returns a communicator over the processes of `ranks`, which it duplicates: all of them call this
// together. Destroy it before MPI_Finalize(). A call that waits longer than `timeout` for another
// rank fails; so do all later ones. Do not call MPI_Finalize() after a failure: it waits.
inline std::unique_ptr<Communicator> make_mpi_communicator(
    MPI_Comm ranks, std::chrono::milliseconds timeout = std::chrono::milliseconds(10'000)) {
  using detail::MpiRanks;
  auto owned = std::make_unique<MpiRanks>(ranks, timeout);
  CommunicatorFunctions table = mpi_functions(*owned);
  table.destroy = [](void* context) { delete static_cast<MpiRanks*>(context); };
  auto communicator = make_communicator(table);
  (void)owned.release();
  return communicator;
}

}  // namespace fovea
