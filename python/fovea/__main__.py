# SPDX-License-Identifier: Apache-2.0
"""The command line tool: `python -m fovea generate MODEL --prompt TEXT`."""

import sys

from fovea import _core


def main() -> int:
    """Runs the command that the arguments of the process name, and returns its exit status."""
    return _core.run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
