// SPDX-License-Identifier: Apache-2.0
// Compiles the C interface alone as C11, with every warning as an error. Structs without padding
// can grow at their end.
#include "fovea/fovea.h"

_Static_assert(sizeof(DLTensor) == 48, "the layout of DLPack");
_Static_assert(sizeof(DLManagedTensorVersioned) == 80, "the layout of DLPack");
_Static_assert(offsetof(fovea_batch, struct_size) == 0, "structs begin with their size");

fovea_status compiles(fovea_backend* backend, const fovea_batch* batch, void* stream);

fovea_status compiles(fovea_backend* backend, const fovea_batch* batch, void* stream) {
  return fovea_backend_plan(backend, batch, stream);
}
