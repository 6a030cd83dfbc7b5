// SPDX-License-Identifier: Apache-2.0
#include "model/random_weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/float_types.h"
#include "core/quote.h"
#include "core/rounding.h"

namespace fovea {
namespace {

// Number of values from one hash.
constexpr int64_t kLanes = 4;
// Number of elements that one task generates.
constexpr int64_t kTaskElements = int64_t{1} << 18;
// Standard deviation of vectors other than norms, for example biases.
constexpr float kVectorDeviation = 0.02f;

// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// FNV-1a of the seed followed by the name.
uint64_t key_of(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u ^ mixed(seed);
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return mixed(hash);
}

// Uniform values from 16 random bits each: the centres of 65536 equal steps.
struct Values {
  uint64_t key;
  float mean, step;

  float at(uint64_t bits, int64_t lane) const {
    const auto number = static_cast<int16_t>(bits >> (16 * lane));
    return mean + step * (static_cast<float>(number) + 0.5f);
  }
};

// Generates elements [first, first + count) of a tensor.
template <typename Stored, typename Convert>
void make(const Values& values, int64_t first, int64_t count, std::byte* out, Convert convert) {
  const int64_t end = first + count;
  for (int64_t i = first; i < end;) {
    const uint64_t bits = mixed(values.key + static_cast<uint64_t>(i / kLanes));
    for (int64_t lane = i % kLanes; lane < kLanes && i < end; ++lane, ++i) {
      const Stored value = convert(values.at(bits, lane));
      std::memcpy(out, &value, sizeof(value));
      out += sizeof(value);
    }
  }
}

void make(const Values& values, DType dtype, int64_t first, int64_t count, std::byte* out) {
  if (dtype == DType::bf16) {
    make<uint16_t>(values, first, count, out, float_to_bf16);
  } else if (dtype == DType::f16) {
    make<uint16_t>(values, first, count, out, float_to_f16);
  } else {
    make<float>(values, first, count, out, [](float value) { return value; });
  }
}

DType read_dtype(const JsonObject& config) {
  const std::string name = config.text_or("dtype", config.text_or("torch_dtype", "bfloat16"));
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  if (name == "float32") return DType::f32;
  fail(ErrorCode::unsupported, "dtype is {}; random weights may be float32, bfloat16 or float16",
       quote(name));
}

// Returns the default distribution: products with a matrix keep the length of their input.
InitialValues default_values(std::span<const int64_t> shape) {
  if (shape.size() < 2) return {.mean = 0, .deviation = kVectorDeviation};
  return InitialValues::of_fan_in(shape.back());
}

}  // namespace

InitialValues InitialValues::of_fan_in(int64_t inputs) {
  return {.mean = 0, .deviation = 1 / std::sqrt(static_cast<float>(std::max<int64_t>(inputs, 1)))};
}

RandomWeights::RandomWeights(const JsonObject& config, uint64_t seed, ThreadPool& threads)
    : dtype_(read_dtype(config)), seed_(seed), threads_(&threads) {}

const StoredTensor& RandomWeights::tensor(std::string_view name, std::span<const int64_t> shape,
                                          const InitialValues& values) {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) {
    check_argument(std::ranges::equal(found->second.shape, shape),
                   "tensor '{}' was generated with shape {}, but requested with {}", name,
                   found->second.shape, shape);
    return found->second;
  }
  StoredTensor tensor;
  tensor.dtype = dtype_;
  tensor.shape.assign(shape.begin(), shape.end());
  const size_t element = dtype_bytes(dtype_);
  tensor.bytes = element;
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(tensor.bytes, static_cast<size_t>(size), &tensor.bytes)) {
      fail(ErrorCode::unsupported, "tensor '{}' of shape {} has 2^64 bytes or more", name, shape);
    }
  }
  const InitialValues filling = values.deviation < 0 ? default_values(shape) : values;
  // The standard deviation of uniform values in [-a, a] is a / sqrt(3).
  const Values made{key_of(seed_, name), filling.mean,
                    filling.deviation * std::sqrt(3.0f) / 32768.0f};
  tensor.make = [made, element, dtype = dtype_, threads = threads_](size_t begin,
                                                                    std::span<std::byte> out) {
    check_argument(begin % element == 0 && out.size() % element == 0,
                   "bytes [{}, {}) of a tensor begin or end inside an element of {} bytes", begin,
                   begin + out.size(), element);
    const auto first = static_cast<int64_t>(begin / element);
    const auto count = static_cast<int64_t>(out.size() / element);
    threads->parallel_for(ceil_div(count, kTaskElements), [&](int64_t task, int) {
      const int64_t from = task * kTaskElements;
      make(made, dtype, first + from, std::min(kTaskElements, count - from),
           out.data() + from * static_cast<int64_t>(element));
    });
  };
  return tensors_.emplace(name, std::move(tensor)).first->second;
}

}  // namespace fovea
