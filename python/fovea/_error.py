# SPDX-License-Identifier: Apache-2.0
"""The exception of the library."""


class Error(RuntimeError):
    """The only exception that the library raises.

    The message names the argument, its value and the limit. `code` is "invalid_argument", "unsupported",
    "out_of_memory", "workspace_too_small", "corrupt_file", "io" or "device_failure".
    """

    def __init__(self, message: str = "", code: str = "invalid_argument") -> None:
        super().__init__(message)
        self.code = code


Error.__module__ = "fovea"
