// SPDX-License-Identifier: Apache-2.0
// portable/mla_merge for the f16 parts that sm90/mla_decode stores.
#pragma once

#include "kernels/cuda/portable/mla_merge/kernel.cuh"
