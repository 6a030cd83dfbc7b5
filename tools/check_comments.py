#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the mechanical half of the rules for English in CONTRIBUTING.md, over every source and document:

- no comment begins with "Of", "What", "Who", "Whoever", "Whether" or "Those";
- bounds are called max and min, in identifiers too;
- the words in RETIRED appear nowhere;
- public headers give no dates;
- a comment of a source has no measurement, except one number with its date.
"""
import io
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ["bench", "examples", "include", "python", "src", "tests", "tools"]
SUFFIXES = {".h", ".c", ".cc", ".cuh", ".py", ".pyi"}
# These files quote what they forbid.
EXEMPT = {"tools/check_comments.py", "tests/tools/check_comments_test.py"}

RETIRED = {
    "settled": "written before this pass",
    "company": "concurrent",
    "beside": "next to, alongside, concurrent",
    "stranger": "unowned",
    "strangers": "unowned, rows outside the request",
    "foreign": "unowned, another program's",
    "whoever": "callers that",
    "by turns": "alternating",
    "as it stands": "current, or nothing",
}
# Other names for bounds. "At most" and "most likely" are plain English.
BOUND = re.compile(r"(?!.*(?:at_most|at_least|most_likely))"
                   r"(?:(?:\w+_)?(?:most|least|MOST|LEAST)_\w*|\w+_(?:most|least)|k\w*(?:Most|Least)(?:[A-Z]\w*)?)")
FRAGMENT = re.compile(r"(?:of|what|who|whoever|whether|those)\b", re.IGNORECASE)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
MEASUREMENT = re.compile(r"\b\d[\d.]*[ ]?(?:%|(?:ns|us|ms)\b)")
# Strings are matched so that // inside them starts no comment.
CPP_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:[^"\\\n]|\\.)*"|(?<!\w)'(?:[^'\\\n]|\\.)*'""",
    re.DOTALL)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def cpp_comments(text):
    """Yields (line, column, True if the line has nothing else, text) for each comment."""
    line, last = 1, 0
    for match in CPP_TOKEN.finditer(text):
        if not match.group().startswith("/"):
            continue
        line, last = line + text.count("\n", last, match.start()), match.start()
        start = text.rfind("\n", 0, last) + 1
        yield line, last - start, not text[start:last].strip(), match.group().strip("/*! \n")


def python_comments(text):
    """Yields the same for Python, where docstrings are comments too."""
    before = tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield *token.start, not token.line[:token.start[1]].strip(), token.string.strip("# ")
        elif token.type == tokenize.STRING and before in (tokenize.INDENT, tokenize.NEWLINE, tokenize.DEDENT):
            yield *token.start, True, token.string.strip('"\' \n')
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def paragraphs(comments):
    """Yields (line, text) for each comment, after joining the lines of one that spans several."""
    first, place, text = 0, (0, 0), ""
    for line, column, alone, words in comments:
        if words.startswith(("SPDX", "!/usr")):
            words = ""
        if alone and words and text and place == (line - 1, column):
            text += " " + words
        else:
            if text:
                yield first, text
            first, text = line, words
        place = (line, column)
    if text:
        yield first, text


def comment_errors(name, comments):
    """Yields (line, error) for each comment that breaks a rule."""
    for line, text in paragraphs(comments):
        if FRAGMENT.match(text):
            yield line, f'a comment begins with "{text.split()[0]}": begin with a subject or a verb'
        found = MEASUREMENT.findall(text)
        if len(found) > 1 or found and not DATE.search(text):
            yield line, f"measurements ({', '.join(found)}): at most one, with its date"
        if name.startswith("include/") and DATE.search(text):
            yield line, f"a date in a public header: {DATE.search(text).group()}"


def occurrences(text, word):
    """Yields the offsets of a lower-case word in any case. str.find is much faster than a regular expression."""
    text = text.lower()
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + 1)


def is_word(text, start, end):
    """Tells whether text[start:end] is a word of its own, a part of a snake_case name or of a CamelCase name."""
    if re.match("[a-z]", text[end:]):
        return False
    return not text[start - 1:start].isalpha() or text[start].isupper() and text[start - 1].islower()


def text_errors(text):
    """Yields (line, error) for each word that no file should have."""
    for word, better in RETIRED.items():
        for at in occurrences(text, word):
            if is_word(text, at, at + len(word)):
                yield line_of(text, at), f'"{word}": {better}'
    names = {re.search(r"\w*$", text[:at]).start() for word in ("most", "least") for at in occurrences(text, word)}
    for at in sorted(names):
        name = re.match(r"\w+", text[at:]).group()
        if BOUND.fullmatch(name):
            yield line_of(text, at), f"{name}: bounds are max and min"


def errors_of(name, text):
    """Returns (line, error) for each violation in the file `name`."""
    errors = [*text_errors(text)]
    if name.endswith((".py", ".pyi")):
        errors += comment_errors(name, python_comments(text))
    elif not name.endswith(".md"):
        errors += comment_errors(name, cpp_comments(text))
    return sorted(errors)


def is_in(name, folders):
    """Returns True if the file is one of `folders` or below one."""
    return any(name == folder or name.startswith(folder + "/") for folder in folders)


def main(arguments):
    """Checks all files, or the folders and files in `arguments`."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    files += [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    errors, checked = [], 0
    for file in sorted(files):
        name = str(file.relative_to(ROOT))
        if name in EXEMPT or arguments and not is_in(name, arguments):
            continue
        checked += 1
        text = file.read_text(encoding="utf-8")
        errors += [f"{name}:{line}: {error}" for line, error in errors_of(name, text)]
    print("\n".join(errors) if errors else f"{checked} files keep the rules for English")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
