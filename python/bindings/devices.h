// SPDX-License-Identifier: Apache-2.0
// Devices, threads and streams as arguments.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "fovea/device.h"
#include "fovea/thread_pool.h"
#include "python/bindings/dlpack.h"

namespace fovea::python {

namespace nb = nanobind;

// A pool of threads that backends share.
struct Threads {
  std::shared_ptr<ThreadPool> pool;
};

// Reads a Device, a DeviceInfo or its name. The device need not exist.
Device device_from(nb::handle object, const char* name);
// As above; also tells properties. Throws Error{unsupported} for a name without such a device.
DeviceInfo device_info_from(nb::handle object, const char* name);
// Reads a Threads, or a number of threads; None and 0: one per core. Equal numbers share a pool.
std::shared_ptr<ThreadPool> threads_from(nb::handle object, const char* name);
// Reads a stream of the device: an address, or an object with `cuda_stream` or `__cuda_stream__`.
// None is the stream on which the library of `api` works, or without it the default stream.
Stream stream_from(nb::handle object, Device device, const DlExchangeApi* api);

}  // namespace fovea::python
