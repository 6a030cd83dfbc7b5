// SPDX-License-Identifier: Apache-2.0
// std::conditional_t, which device code cannot include.
#pragma once

namespace fovea::kernels::cuda {

template <bool kCondition, class First, class Second>
struct ConditionalType {
  using Type = First;
};
template <class First, class Second>
struct ConditionalType<false, First, Second> {
  using Type = Second;
};
template <bool kCondition, class First, class Second>
using Conditional = typename ConditionalType<kCondition, First, Second>::Type;

}  // namespace fovea::kernels::cuda
