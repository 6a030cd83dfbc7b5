# SPDX-License-Identifier: Apache-2.0
"""The parts that Fovea's plug-ins for serving engines share: fovea.vllm and fovea.sglang."""
