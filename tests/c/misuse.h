// SPDX-License-Identifier: Apache-2.0
// Tables of wrong arguments and of the messages that name them.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "c/small_world.h"

namespace fovea::test {

struct Misuse {
  std::string name;
  std::function<fovea_status(SmallWorld&)> call;
  std::string message;  // a part of it
  fovea_status status = FOVEA_INVALID_ARGUMENT;
};

inline void PrintTo(const Misuse& misuse, std::ostream* to) { *to << misuse.name; }

// Wrong arrays of a batch, and wrong tensors of a layer.
std::vector<Misuse> misused_arrays();
std::vector<Misuse> misused_tensors();

}  // namespace fovea::test
