// SPDX-License-Identifier: Apache-2.0
#include "model/read_rope.h"

#include <fmt/format.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/quote.h"

namespace fovea {
namespace {

using kernels::RopeScaling;

// The ranges exceed all known models but keep angles finite.
constexpr double kMaxTheta = 1e15, kMinFactor = 1e-6, kMaxFactor = 1e6;
constexpr int64_t kMaxPositions = 1 << 24;

// The objects that describe the positions of some layers, in order of precedence. The first object
// that contains a field, even as null, defines it.
class RopeFields {
 public:
  RopeFields(const JsonObject& config, const RopeDefaults& defaults, std::string_view layer_type)
      : config_(config), defaults_(defaults) {
    if (layer_type.empty()) {
      find_flat();
    } else {
      find_by_layer_type(layer_type);
    }
  }

  // Returns null if no object contains the field.
  const JsonObject* holder(std::string_view field) const {
    for (const JsonObject& object : objects_) {
      if (object.contains(field)) return &object;
    }
    return nullptr;
  }

  const JsonObject& need(std::string_view field) const {
    const JsonObject* found = holder(field);
    if (found != nullptr) return *found;
    if (objects_.empty()) config_.refuse(fmt::format("rope_parameters.{}", field), "set");
    objects_.front().refuse(field, "set");
  }

  double positive(std::string_view field) const {
    return need(field).number(field, kMinFactor, kMaxFactor);
  }

  // Reads a field that may be missing or null.
  double number_or(std::string_view field, double fallback, double low, double high) const {
    const JsonObject* found = holder(field);
    return found == nullptr ? fallback : found->number_or(field, fallback, low, high);
  }

  std::string type() const {
    for (const std::string_view field : {"rope_type", "type"}) {
      if (const JsonObject* found = holder(field)) return found->text(field);
    }
    return "default";
  }

  double theta() const {
    constexpr double kAboveOne = 1 + 1e-6;
    if (const JsonObject* found = holder("rope_theta")) {
      return found->number("rope_theta", kAboveOne, kMaxTheta);
    }
    if (!config_.contains(defaults_.theta_field)) return defaults_.theta;
    return config_.number(defaults_.theta_field, kAboveOne, kMaxTheta);
  }

  int32_t rotary_dim(int32_t head_dim) const {
    constexpr std::string_view kField = "partial_rotary_factor";
    const JsonObject* found = holder(kField);
    const JsonObject& owner = found == nullptr ? config_ : *found;
    double factor = defaults_.partial_rotary_factor;
    if (found != nullptr) {
      factor = owner.number(kField, 0, 1);
    } else if (config_.contains(kField)) {
      factor = owner.number_or(kField, 1, 0, 1);
    }
    if (factor != 1 && !defaults_.rotates_parts) {
      fail(ErrorCode::unsupported,
           "partial_rotary_factor is {}; this architecture rotates whole heads", factor);
    }
    const auto dim = static_cast<int32_t>(head_dim * factor);
    if (dim < 2 || dim % 2 != 0) {
      owner.refuse(kField, fmt::format("a share that leaves an even number of {} dims", head_dim));
    }
    return dim;
  }

  int32_t max_positions() const {
    return static_cast<int32_t>(config_.integer("max_position_embeddings", 1, kMaxPositions));
  }

  // Returns the context length that the model was trained for before its positions were scaled.
  int32_t original_max_positions() const {
    constexpr std::string_view kField = "original_max_position_embeddings";
    const JsonObject* found = holder(kField);
    // Values by layer type ignore the top-level field.
    if (!by_layer_type_ && config_.contains(kField)) {
      found = &config_;
    } else if (defaults_.original_max_positions > 0) {
      return defaults_.original_max_positions;
    }
    if (found == nullptr) return max_positions();
    return static_cast<int32_t>(found->integer(kField, 1, kMaxPositions));
  }

  // Reads `truncate`, which is common to all layer types; null means false.
  bool truncates() const {
    const JsonObject* found = parameters_ && parameters_->contains("truncate") ? &*parameters_
                              : by_layer_type_                                 ? nullptr
                                                                               : holder("truncate");
    return found == nullptr || found->boolean_or("truncate", false);
  }

 private:
  static bool is_empty(const JsonObject& object) { return object.fields().empty(); }

  // rope_scaling replaces rope_parameters.
  void find_flat() {
    if (config_.has("rope_scaling") && !is_empty(config_.object("rope_scaling"))) {
      objects_.push_back(config_.object("rope_scaling"));
    } else if (config_.has("rope_parameters")) {
      objects_.push_back(config_.object("rope_parameters"));
    } else if (!defaults_.parameters.empty()) {
      objects_.push_back(JsonObject::parse(defaults_.parameters, "defaults of the architecture"));
    }
    for (const JsonObject& object : objects_) {
      for (const std::string& field : object.fields()) {
        if (!object.is_object(field)) continue;
        object.refuse(field, "a value, as one set of values serves all layers");
      }
    }
  }

  // rope_scaling extends the values of rope_parameters field by field.
  void find_by_layer_type(std::string_view layer_type) {
    by_layer_type_ = true;
    if (defaults_.has_rope_scaling && config_.has("rope_scaling")) {
      objects_.push_back(config_.object("rope_scaling"));
      // The reference ignores the older spelling here.
      if (!objects_[0].contains("rope_type") && objects_[0].contains("type")) {
        objects_[0].refuse("type", "spelled rope_type");
      }
    }
    if (!config_.has("rope_parameters")) return;
    parameters_ = config_.object("rope_parameters");
    for (const std::string& field : parameters_->fields()) {
      if (!parameters_->has(field) || parameters_->is_object(field) || field == "truncate")
        continue;
      parameters_->refuse(field, "inside the values of a layer type");
    }
    if (parameters_->has(layer_type)) objects_.push_back(parameters_->object(layer_type));
  }

  const JsonObject& config_;
  const RopeDefaults& defaults_;
  std::vector<JsonObject> objects_;
  std::optional<JsonObject> parameters_;  // parameters of all layer types
  bool by_layer_type_ = false;
};

RopeScaling scaling_of(const RopeFields& fields, const RopeDefaults& defaults) {
  constexpr std::array<std::pair<std::string_view, RopeScaling>, 6> kTypes = {{
      {"default", RopeScaling::none},
      {"linear", RopeScaling::linear},
      {"dynamic", RopeScaling::dynamic},
      {"llama3", RopeScaling::llama3},
      {"yarn", RopeScaling::yarn},
      {"longrope", RopeScaling::longrope},
  }};
  const std::string type = fields.type();
  const bool is_older_longrope = defaults.yarn_is_longrope && (type == "su" || type == "yarn");
  std::string known;
  for (const auto& [name, scaling] : kTypes) {
    const bool is_legal = !defaults.yarn_is_longrope || name == "default" || name == "longrope";
    if (!is_legal) continue;
    if (name == type || (is_older_longrope && name == "longrope")) return scaling;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
  }
  fail(ErrorCode::unsupported, "rope_type is {}; supported are {}", quote(type), known);
}

// Reads the factor. Without one, returns the ratio of the extended length to the original length.
double factor_or_ratio(const RopeFields& fields, const kernels::RopeSpec& spec) {
  const JsonObject* found = fields.holder("factor");
  if (found != nullptr && found->has("factor")) return fields.positive("factor");
  return static_cast<double>(fields.max_positions()) / spec.original_max_positions;
}

void read_yarn(const RopeFields& fields, kernels::RopeSpec& spec) {
  constexpr double kFast = 32, kSlow = 1;
  fields.need("factor");
  spec.factor = factor_or_ratio(fields, spec);
  spec.attention_factor = fields.number_or("attention_factor", 0, kMinFactor, kMaxFactor);
  // Both 0 and null select the default.
  const auto beta = [&](std::string_view field, double fallback) {
    const double value = fields.number_or(field, fallback, 0, kMaxFactor);
    return value == 0 ? fallback : value;
  };
  spec.beta_fast = beta("beta_fast", kFast);
  spec.beta_slow = beta("beta_slow", kSlow);
  spec.truncate = fields.truncates();
}

void read_longrope(const RopeFields& fields, kernels::RopeSpec& spec) {
  spec.factor = factor_or_ratio(fields, spec);
  spec.attention_factor = fields.number_or("attention_factor", 0, kMinFactor, kMaxFactor);
  const auto factors = [&](std::string_view field) {
    const JsonObject& object = fields.need(field);
    const size_t pairs = static_cast<size_t>(spec.rotary_dim) / 2;
    std::vector<double> values = object.numbers(field, kMinFactor, kMaxFactor);
    if (values.size() != pairs) object.refuse(field, fmt::format("an array of {}", pairs));
    return values;
  };
  spec.short_factors = factors("short_factor");
  spec.long_factors = factors("long_factor");
}

void read_llama3(const RopeFields& fields, kernels::RopeSpec& spec) {
  spec.factor = fields.positive("factor");
  spec.low_freq_factor = fields.positive("low_freq_factor");
  spec.high_freq_factor = fields.positive("high_freq_factor");
  if (spec.high_freq_factor <= spec.low_freq_factor) {
    fields.need("high_freq_factor")
        .refuse("high_freq_factor",
                fmt::format("above low_freq_factor, which is {}", spec.low_freq_factor));
  }
}

}  // namespace

kernels::RopeSpec read_rope(const JsonObject& config, int32_t head_dim,
                            const RopeDefaults& defaults, std::string_view layer_type) {
  const RopeFields fields(config, defaults, layer_type);
  kernels::RopeSpec spec;
  spec.theta = fields.theta();
  spec.rotary_dim = fields.rotary_dim(head_dim);
  spec.scaling = scaling_of(fields, defaults);
  if (spec.scaling == RopeScaling::none) return spec;
  // DeepSeek's softmax scale uses these fields with any type of scaling.
  constexpr double kMaxMscale = 100;
  spec.mscale = fields.number_or("mscale", 0, 0, kMaxMscale);
  spec.mscale_all_dim = fields.number_or("mscale_all_dim", 0, 0, kMaxMscale);
  if (spec.scaling == RopeScaling::linear || spec.scaling == RopeScaling::dynamic) {
    spec.factor = fields.positive("factor");
    return spec;
  }
  spec.original_max_positions = fields.original_max_positions();
  if (spec.scaling == RopeScaling::yarn) read_yarn(fields, spec);
  if (spec.scaling == RopeScaling::longrope) read_longrope(fields, spec);
  if (spec.scaling == RopeScaling::llama3) read_llama3(fields, spec);
  return spec;
}

}  // namespace fovea
