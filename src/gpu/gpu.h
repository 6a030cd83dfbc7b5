// SPDX-License-Identifier: Apache-2.0
// One GPU and its objects. Each class owns the object that it creates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fovea/device.h"
#include "gpu/driver.h"

namespace fovea::gpu {

// Releases the driver's objects.
struct Release {
  void operator()(Stream stream) const;
  void operator()(CUevent event) const;
  void operator()(CUgraph graph) const;
  void operator()(CUgraphExec exec) const;
  void operator()(CUmodule module) const;
};
// Owns an object by the type that its handle points to: Owned<CUevent_st> is an event.
template <typename T>
using Owned = std::unique_ptr<T, Release>;

// A device's primary context, which the whole process shares. bind() makes it current on the
// calling thread, as required by all other calls in this folder.
class Context {
 public:
  // Throws Error{invalid_argument} if there is no such device.
  explicit Context(int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void bind() const;
  // For destructors: binds if the driver still works, so that objects can be freed.
  void bind_to_free() const noexcept;
  const DeviceInfo& info() const { return info_; }
  size_t free_bytes() const;

  // Returns true if kernels of this device can access memory of the other one.
  bool can_access(const Context& other) const;
  // Lets them; requires can_access(). Binds this context.
  void allow_access_to(const Context& other) const;

 private:
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  DeviceInfo info_;
};

// Device memory, aligned to 256 bytes. Throws Error{out_of_memory} with the requested and the free
// bytes.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes);

  template <typename T = void>
  T* data() const {
    return static_cast<T*>(data_.get());
  }
  size_t bytes() const { return bytes_; }
  // The buffer as an array; its elements are device memory.
  template <typename T>
  std::span<T> span() const {
    return {data<T>(), bytes_ / sizeof(T)};
  }

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

// Returns the name of a buffer for OpenedMemory in other processes of the machine.
CUipcMemHandle name_of(const DeviceBuffer& buffer);

// Device memory of another process, which outlives this object. Throws Error{device_failure} if
// this GPU cannot access it.
class OpenedMemory {
 public:
  explicit OpenedMemory(const CUipcMemHandle& name);

  template <typename T>
  T* data() const {
    return static_cast<T*>(data_.get());
  }

 private:
  struct Close {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Close> data_;
};

// Page-locked host memory, which allows asynchronous copies and accesses by kernels of all GPUs.
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

// Copies are ordered by the stream. Host memory must stay valid until the copy has completed.
void copy_to_device(void* to, const void* from, size_t bytes, Stream stream);
void copy_to_host(void* to, const void* from, size_t bytes, Stream stream);
void copy_on_device(void* to, const void* from, size_t bytes, Stream stream);
// Copies `rows` rows of `width` bytes, which are from_pitch and to_pitch bytes apart.
struct RowPitches {
  size_t from = 0, to = 0;
};
void copy_rows_on_device(void* to, const void* from, RowPitches pitches, size_t width, size_t rows,
                         Stream stream);
void fill_bytes(void* to, uint8_t value, size_t bytes, Stream stream);
void fill_floats(float* to, float value, size_t count, Stream stream);
void synchronize(Stream stream);
// Has completed the copy when it returns.
template <typename T>
DeviceBuffer to_device(const std::vector<T>& values, Stream stream) {
  DeviceBuffer buffer(values.size() * sizeof(T));
  copy_to_device(buffer.data(), values.data(), buffer.bytes(), stream);
  synchronize(stream);
  return buffer;
}
size_t free_bytes();  // on the current device, for all processes

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
  bool reached() const;                                // true, too, before the first record()
  float milliseconds_since(const Event& start) const;  // both events must be recorded and reached

 private:
  Owned<CUevent_st> event_;
};

// A sequence of captured operations, replayed with one call.
class Graph {
 public:
  // Captures the operations that `work(stream)` enqueues. If it throws, ends the capture and
  // rethrows.
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

  Owned<CUgraph_st> graph_;  // contains the nodes
  Owned<CUgraphExec_st> exec_;
};

}  // namespace fovea::gpu
