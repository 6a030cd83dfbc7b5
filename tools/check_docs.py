#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when the README's example or a snippet of the tutorial differs from the compiled ones, when a document names a
file or test that does not exist, or when a line of text in a document is wider than 120 columns (tables and code may be
wider)."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH = 120
FOLDERS = "bench|cmake|docs|examples|include|src|testdata|tests|tools"


def missing_paths(text):
    """Yields paths in backquotes that match no file. NAME matches anything, as * does."""
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./*-]+)`", text):
        if not list(ROOT.glob(path.replace("NAME", "*").rstrip("/"))):
            yield path


def all_tests():
    """Returns (suite, test) for every test in tests/."""
    sources = "\n".join(file.read_text(encoding="utf-8") for file in ROOT.glob("tests/*/*_test.cc"))
    return set(re.findall(r"^TEST(?:_P|_F)?\((\w+), (\w+)\)", sources, re.MULTILINE))


def missing_tests(text, tests):
    """Yields tests named as Suite.Test that do not exist."""
    suites = {suite for suite, _ in tests}
    for suite, test in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
        if suite in suites and (suite, test) not in tests:
            yield f"{suite}.{test}"


def without_indentation(text):
    return "\n".join(line.strip() for line in text.strip().splitlines())


def unknown_snippets(text):
    """Yields the first line of each snippet of C or C++ that no example contains."""
    files = [*ROOT.glob("examples/*.cc"), *ROOT.glob("examples/c/*.c")]
    examples = [without_indentation(file.read_text(encoding="utf-8")) for file in files]
    for snippet in re.findall(r"```(?:cpp|c)\n(.*?)```", text, re.DOTALL):
        wanted = without_indentation(snippet)
        if not any(wanted in example for example in examples):
            yield wanted.splitlines()[0]


def wide_lines(text):
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif len(line) > WIDTH and not in_code and not line.startswith("|"):
            yield number, len(line)


def main():
    errors = []
    example = (ROOT / "examples/hello_attention.cc").read_text(encoding="utf-8")
    if f"```cpp\n{example}```" not in (ROOT / "README.md").read_text(encoding="utf-8"):
        errors.append("README.md: the first example differs from examples/hello_attention.cc")
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    errors += [f"docs/tutorial.md: no example has the snippet: {line}" for line in unknown_snippets(tutorial)]
    tests = all_tests()
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for document in documents:
        name, text = document.relative_to(ROOT), document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)", text):
            if not target.startswith("http") and not (document.parent / target).exists():
                errors.append(f"{name}: no {target}")
        errors += [f"{name}: no {path}" for path in missing_paths(text)]
        errors += [f"{name}: no test {test}" for test in missing_tests(text, tests)]
        errors += [f"{name}:{line}: {width} columns, at most {WIDTH}" for line, width in wide_lines(text)]
    print("\n".join(errors) if errors else f"{len(documents)} documents: links, paths, tests, widths and example right")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
