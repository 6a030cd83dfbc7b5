// SPDX-License-Identifier: Apache-2.0
// Unicode normalisation form C (Unicode Standard Annex 15).
#pragma once

#include <string>
#include <string_view>

namespace fovea {

// `text` is valid UTF-8. Time is O(n log n) for any text.
std::string to_nfc(std::string_view text);

}  // namespace fovea
