// SPDX-License-Identifier: Apache-2.0
// Linked into every test of this folder: makes a GPU's backends the backends under test. Without
// it, a test of all GPU backends has no cases and passes unless ctest starts it.
#include <cstdlib>

namespace {
[[maybe_unused]] const bool kNamed = setenv("FOVEA_TEST_DEVICE", "cuda", 0) == 0;
}  // namespace
