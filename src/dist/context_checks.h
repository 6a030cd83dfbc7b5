// SPDX-License-Identifier: Apache-2.0
// Shapes and checks that context parallel attention has in common on all devices.
#pragma once

#include <string_view>

#include "fovea/context_parallel.h"

namespace fovea {

// Throws Error{invalid_argument} naming the field that is out of range.
void check_exchange_shape(const ContextExchangeShape& shape, const Communicator& ranks);
// Throws Error{invalid_argument} naming what is wrong with the rows of a call.
void check_exchanged_rows(const ContextExchangeShape& shape, const HeadRows& rows,
                          std::string_view name, int64_t tokens);

// Throws Error{invalid_argument} naming what is wrong with the options of a backend for this many
// ranks.
void check_context_options(const ContextBackendOptions& options, const AttentionBackend* local,
                           int ranks);
// Throws Error{invalid_argument} if the host's part of a batch does not fit the limits or itself.
void check_context_batch(const BatchView& batch, const BatchLimits& limits);
// Throws Error{invalid_argument} if a layer's queries or keys do not come as a backend needs them.
void check_context_layer(const LayerTensors& layer);

// Returns the shape of the states of such layers, for up to max_tokens new tokens.
ContextExchangeShape exchange_shape(const ContextBackendOptions& options, int ranks,
                                    int32_t max_tokens, Device device);

}  // namespace fovea
