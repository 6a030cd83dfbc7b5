// SPDX-License-Identifier: Apache-2.0
// Compiles the C interface as C++11.
#include "fovea/fovea.h"

static_assert(sizeof(fovea_device) == 8, "structs of C have one layout in both languages");
