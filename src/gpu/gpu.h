// SPDX-License-Identifier: Apache-2.0
// One GPU and the objects that live on it. Everything here is an owner: it frees what it made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fovea/device.h"
#include "gpu/driver.h"

namespace fovea::gpu {

// How the driver's objects are given back.
struct Release {
  void operator()(Stream stream) const;
  void operator()(CUevent event) const;
  void operator()(CUgraph graph) const;
  void operator()(CUgraphExec exec) const;
  void operator()(CUmodule module) const;
};
// Of what a handle points to: Owned<CUevent_st> is an event.
template <typename T>
using Owned = std::unique_ptr<T, Release>;

// A device's primary context, shared with whatever else in the process uses CUDA. bind() makes it
// current on the calling thread, which every other call of this folder needs.
class Context {
 public:
  // Error{invalid_argument} when there is no such device.
  explicit Context(int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void bind() const;
  // For destructors: binds if the driver still answers, so that what lives here can be freed.
  void bind_to_free() const noexcept;
  const DeviceInfo& info() const { return info_; }
  size_t free_bytes() const;

 private:
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  DeviceInfo info_;
};

// Device memory, 256-byte aligned. Error{out_of_memory} names the bytes asked for and free.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes);

  template <typename T = void>
  T* data() const {
    return static_cast<T*>(data_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

// Page-locked host memory: copies from and to it are asynchronous.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t bytes);

  template <typename T = void>
  T* data() const {
    return static_cast<T*>(data_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

// Copies are ordered by the stream; host memory must stay valid until it has reached them.
void copy_to_device(void* to, const void* from, size_t bytes, Stream stream);
void copy_to_host(void* to, const void* from, size_t bytes, Stream stream);
void fill_bytes(void* to, uint8_t value, size_t bytes, Stream stream);
void fill_floats(float* to, float value, size_t count, Stream stream);
void synchronize(Stream stream);
// Copied when it returns.
template <typename T>
DeviceBuffer to_device(const std::vector<T>& values, Stream stream) {
  DeviceBuffer buffer(values.size() * sizeof(T));
  copy_to_device(buffer.data(), values.data(), buffer.bytes(), stream);
  synchronize(stream);
  return buffer;
}
size_t free_bytes();  // of the current device, for any process

class OwnedStream {
 public:
  OwnedStream();
  Stream get() const { return stream_.get(); }

 private:
  Owned<CUstream_st> stream_;
};

class Event {
 public:
  Event();

  void record(Stream stream);
  void wait() const;                                   // blocks the caller
  float milliseconds_since(const Event& start) const;  // both recorded and reached

 private:
  Owned<CUevent_st> event_;
};

// What a stream was told between begin and end of a capture, replayed with one call.
class Graph {
 public:
  // Captures what `work(stream)` enqueues. If it throws, the capture is ended and the error passes
  // on.
  template <typename Work>
  static Graph capture(Stream stream, Work&& work) {
    begin_capture(stream);
    try {
      work(stream);
    } catch (...) {
      abandon_capture(stream);
      throw;
    }
    return end_capture(stream);
  }
  void launch(Stream stream) const;
  CUgraphExec exec() const { return exec_.get(); }

 private:
  static void begin_capture(Stream stream);
  static void abandon_capture(Stream stream);
  static Graph end_capture(Stream stream);

  Owned<CUgraph_st> graph_;  // has the nodes
  Owned<CUgraphExec_st> exec_;
};

}  // namespace fovea::gpu
