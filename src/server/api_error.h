// SPDX-License-Identifier: Apache-2.0
// Refusals of requests, with the error body that clients of OpenAI's API read.
#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace fovea::server {

class ApiError : public std::runtime_error {
 public:
  // `param` is the path of the field at fault, such as "messages[0].role", or empty.
  ApiError(int status, std::string_view param, const std::string& message)
      : std::runtime_error(message), status_(status), param_(param) {}

  int status() const { return status_; }
  const std::string& param() const { return param_; }
  // Returns {"error": {"message", "type", "param", "code"}}.
  std::string body() const;

 private:
  int status_;
  std::string param_;
};

// Throws ApiError 400 with the composed message.
template <typename... Args>
[[noreturn]] void refuse(std::string_view param, fmt::format_string<Args...> format,
                         Args&&... args) {
  throw ApiError(400, param, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fovea::server
