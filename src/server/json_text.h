// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace fovea::server {

// Return JSON in one line. Generated text may be cut inside a character, which becomes U+FFFD.
template <typename Json>
requires nlohmann::detail::is_basic_json<Json>::value std::string json_text(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}
inline std::string json_text(std::string_view text) { return json_text(nlohmann::json(text)); }

}  // namespace fovea::server
