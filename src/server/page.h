// SPDX-License-Identifier: Apache-2.0
// The web page at "/": a chat with the model.
#pragma once

#include <string_view>

namespace fovea::server {

std::string_view chat_page();
std::string_view page_policy();  // its Content-Security-Policy

}  // namespace fovea::server
