// SPDX-License-Identifier: Apache-2.0
// Part of every test of this folder: the backends under test are a GPU's, however it is started.
// Without it a test of all GPU backends that is not started by ctest has no cases, and passes.
#include <cstdlib>

namespace {
[[maybe_unused]] const bool kNamed = setenv("FOVEA_TEST_DEVICE", "cuda", 0) == 0;
}  // namespace
