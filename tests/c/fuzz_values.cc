// SPDX-License-Identifier: Apache-2.0
#include "c/fuzz_values.h"

namespace fovea::test {

void mutate_tensor(DLTensor& tensor, FuzzBytes& bytes) {
  constexpr int32_t kTypesOfDevice[] = {0, kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged, 99, -1};
  switch (bytes.next() % 10) {
    case 0: {
      const int32_t type = bytes.pick(kTypesOfDevice);
      std::memcpy(&tensor.device.device_type, &type, sizeof type);
      break;
    }
    case 1:
      tensor.device.device_id = bytes.pick(kInts);
      break;
    case 2:
      tensor.dtype = bytes.pick(kTypes);
      break;
    case 3:
      tensor.ndim = bytes.pick(kInts);
      break;
    case 4:
      if (tensor.shape != nullptr) tensor.shape[bytes.next() % 4] = bytes.pick(kExtents);
      break;
    case 5:
      if (tensor.strides != nullptr) tensor.strides[bytes.next() % 4] = bytes.pick(kStrides);
      break;
    case 6:
      tensor.byte_offset = bytes.pick(kOffsets);
      break;
    case 7:
      if (bytes.next() % 2 == 0) {
        tensor.data = nullptr;
      } else if (tensor.data != nullptr) {
        tensor.data = static_cast<char*>(tensor.data) + 1;
      }
      break;
    case 8:
      tensor.strides = nullptr;
      break;
    default:
      tensor.shape = nullptr;
  }
}

}  // namespace fovea::test
