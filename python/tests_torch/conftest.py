# SPDX-License-Identifier: Apache-2.0
"""Markers of the torch tests: those marked gpu are skipped without a GPU."""

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))
