# SPDX-License-Identifier: Apache-2.0
"""Stands in for SGLang's CUDA kernels, whose wheel does not load without a GPU. SGLang imports their names; on a CPU it
calls none of them."""

from empty_package import stand_in

stand_in(__name__, "0.4.5")
