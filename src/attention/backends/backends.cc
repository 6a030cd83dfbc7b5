// SPDX-License-Identifier: Apache-2.0
#include "attention/backends/backends.h"

namespace fovea {

std::vector<BackendEntry> builtin_backends() {
  std::vector<BackendEntry> list;
  list.push_back(flash_backend());
  list.push_back(portable_backend());
  list.push_back(mla_backend());
  list.push_back(portable_mla_backend());
  list.push_back(cpu_backend());
  list.push_back(linear_backend());
  list.push_back(linear_cuda_backend());
  list.push_back(reference_backend());
  for (BackendEntry& entry : missing_gpu_backends()) list.push_back(std::move(entry));
  for (BackendEntry& entry : unported_backends()) list.push_back(std::move(entry));
  return list;
}

}  // namespace fovea
