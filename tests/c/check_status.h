// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "fovea/fovea.h"

namespace fovea::test {

// Throws the Error of a failed call.
void check_status(fovea_status status);

}  // namespace fovea::test
