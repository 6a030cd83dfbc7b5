// SPDX-License-Identifier: Apache-2.0
// Linear layers: whole sequences and their expected outputs.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "fovea/attention_backend.h"
#include "fovea/kv_cache.h"
#include "support/oracle.h"

namespace fovea::test {

struct LinearCase {
  std::string name;
  AttentionSpec spec;
  std::vector<int32_t> lengths;  // tokens of each sequence
  bool conv_bias = true;
  bool skip = true;          // mamba1, mamba2
  bool l2_normalise = true;  // gated_delta_net, kda
  bool plain_conv = false;   // short_conv
  DType state_dtype = DType::f32;
  uint32_t seed = 1;
};

inline void PrintTo(const LinearCase& test, std::ostream* to) { *to << test.name; }

std::vector<LinearCase> linear_cases();

StateCacheSpec state_spec(const LinearCase& test);

struct LinearSequence {
  std::vector<float> mixed;      // [length, conv_dim]
  std::vector<float> log_decay;  // [length, value_heads]; kda: [.., key_dim]
  std::vector<float> beta;       // [length, value_heads]
};

struct LinearData {
  std::vector<LinearSequence> sequences;
  std::vector<float> conv_weight;     // [conv_dim, conv_width]
  std::vector<float> conv_bias;       // [conv_dim]
  std::vector<float> skip;            // [value_heads]
  std::vector<float> head_log_decay;  // lightning: [value_heads]
  std::vector<float> a;               // mamba1: [value_heads, key_dim]
};

LinearData make_data(const LinearCase& test);

// Returns the tensors of one sequence that the case's kind takes, in host memory of `data`. mamba1:
// those of the scan.
LinearTensors tensors_of(const LinearCase& test, const LinearData& data,
                         const LinearSequence& sequence);
// Returns those of a convolution alone.
LinearTensors convolution_of(const LinearCase& test, const LinearData& data,
                             const LinearSequence& sequence);
// True if a layer of the case makes two calls of forward(): the convolution first.
bool makes_two_calls(const LinearCase& test);

// Returns the outputs [length, value_heads, value_dim] of one sequence, by other formulas than the
// kernels: the delta rule as products of matrices, other kinds as attention without softmax.
OracleResult oracle(const LinearCase& test, const LinearData& data, size_t sequence);

}  // namespace fovea::test
