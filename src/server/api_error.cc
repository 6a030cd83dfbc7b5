// SPDX-License-Identifier: Apache-2.0
#include "server/api_error.h"

#include "server/json_text.h"

namespace fovea::server {
namespace {

const char* error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    default:
      return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

}  // namespace

std::string ApiError::body() const {
  nlohmann::ordered_json error = {
      {"message", what()}, {"type", error_type(status_)}, {"param", nullptr}, {"code", status_}};
  if (!param_.empty()) error["param"] = param_;
  nlohmann::ordered_json body;
  body["error"] = error;
  return json_text(body);
}

}  // namespace fovea::server
