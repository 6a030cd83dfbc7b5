#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when the README's example is not the compiled one, or a link in a document leads nowhere."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    errors = []
    example = (ROOT / "examples/hello_attention.cc").read_text(encoding="utf-8")
    if f"```cpp\n{example}```" not in (ROOT / "README.md").read_text(encoding="utf-8"):
        errors.append("README.md: the first example differs from examples/hello_attention.cc")
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
            if not target.startswith("http") and not (document.parent / target).exists():
                errors.append(f"{document.relative_to(ROOT)}: no {target}")
    print("\n".join(errors) if errors else f"{len(documents)} documents, links and example right")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
