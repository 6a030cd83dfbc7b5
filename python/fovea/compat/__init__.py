# SPDX-License-Identifier: Apache-2.0
"""Modules with the interfaces of other attention libraries."""
