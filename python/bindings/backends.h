// SPDX-License-Identifier: Apache-2.0
// Backends as Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <optional>

#include "fovea/attention_backend.h"
#include "fovea/select_backend.h"
#include "python/bindings/tensors.h"

namespace fovea::python {

// The objects that a backend needs as long as it lives.
struct BackendParts {
  nb::object kv = nb::none(), state = nb::none();
  std::shared_ptr<ThreadPool> threads;
};

// A backend with what it uses. Functions that work release the GIL and wait for each other.
class Backend {
 public:
  Backend(const AttentionSpec& spec, BackendParts parts, std::unique_ptr<AttentionBackend> backend)
      : spec_(spec), parts_(std::move(parts)), backend_(std::move(backend)) {}

  const AttentionSpec& spec() const { return spec_; }
  const BackendParts& parts() const { return parts_; }
  const std::optional<BatchLimits>& limits() const { return limits_; }
  // Throws Error{invalid_argument} if the backend became part of a composition.
  AttentionBackend& get() const;
  LayerShape shape() const { return {spec_, get().device()}; }

  void reserve(const BatchLimits& limits, nb::handle workspace);
  void plan(nb::handle batch, nb::handle stream);
  void forward(const LayerInput& input, Stream stream);
  std::unique_ptr<AttentionBackend> release();  // the backend cannot be used afterwards

 private:
  AttentionSpec spec_;
  BackendParts parts_;
  nb::object workspace_, batch_;
  Keeper keeper_;  // keeps the workspace
  std::optional<BatchLimits> limits_;
  int32_t tokens_ = 0;  // new tokens of the planned batch
  std::mutex mutex_;
  std::unique_ptr<AttentionBackend> backend_;  // last: it refers to the others
};

}  // namespace fovea::python
