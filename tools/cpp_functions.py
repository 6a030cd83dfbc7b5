# SPDX-License-Identifier: Apache-2.0
"""Finds the functions and templates of a C++ or CUDA source by their brackets, without a compiler."""
import re
from typing import NamedTuple

# Comments, literals and preprocessor lines: they may hold any brackets.
HIDDEN = re.compile(r"""//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*\""""
                    r"""|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
                    re.DOTALL | re.MULTILINE)
SCOPE = re.compile(r"\b(namespace|class|struct|enum|union|extern)\b")
AFTER_PARAMETERS = r"(\s*\b(const|noexcept|override|final|mutable)\b|\s*&&?|\s*->[\w:<>,\s*&]+|\s*requires.*)*"
SIGNATURE = re.compile(r"\)" + AFTER_PARAMETERS + r"(\s*:\s.*[)}])?$", re.DOTALL)


class Function(NamedTuple):
    name: str
    line: int        # the first line of its head
    lines: int
    parameters: int


def _hide(text):
    return HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)


def _parameters(head):
    """Returns the name before the first parameter list of a function's head, and the number of its parameters."""
    begin = re.search(r"([\w:~]+(?:<[\w:, ]+>)?|operator\s*(?:\(\s*\)|[^\w\s(]+))\s*\(", head)
    depth, angles, commas, at = 1, 0, 0, begin.end()
    while depth > 0:
        char = head[at]
        depth += (char in "([{") - (char in ")]}")
        angles += (char == "<") - (char == ">")
        commas += char == "," and depth == 1 and angles <= 0
        at += 1
    inside = head[begin.end():at - 1].strip()
    name = begin.group(1).lstrip(":")
    if name.startswith("TEST"):
        return ".".join(inside.replace(",", " ").split()), 0
    return name, 0 if inside in ("", "void") else commas + 1


def find_functions(source):
    """Returns every function that is defined in a namespace or a class; lambdas belong to the function around them."""
    text = _hide(source)
    functions, open_braces, head_begin, parentheses = [], [], 0, 0
    for at, char in enumerate(text):
        parentheses += (char == "(") - (char == ")")
        if parentheses > 0 or char not in ";{}":
            continue
        outside = all(kind == "scope" for kind, _ in open_braces)
        if char == "{":
            head = text[head_begin:at]
            kind = "other"
            if outside and SIGNATURE.search(head.strip()):
                kind = "function"
            elif outside and SCOPE.search(head) and "=" not in head:
                kind = "scope"
            open_braces.append((kind, head_begin + len(head) - len(head.lstrip())))
            if kind == "scope":
                head_begin = at + 1
        elif char == "}":
            kind, begin = open_braces.pop()
            if kind == "function":
                head = text[begin:at]
                name, parameters = _parameters(head)
                lines = text.count("\n", begin, at) + 1
                functions.append(Function(name, text.count("\n", 0, begin) + 1, lines, parameters))
            if kind != "other":
                head_begin = at + 1
        elif outside:
            head_begin = at + 1
    return functions


def find_templates(source):
    """Yields (name, number of parameters) for every template."""
    text = _hide(source)
    for begin in re.finditer(r"\btemplate\s*<", text):
        depth, commas, at = 1, 0, begin.end()
        while depth > 0 and at < len(text):
            depth += (text[at] == "<") - (text[at] == ">")
            commas += text[at] == "," and depth == 1
            at += 1
        declared = re.match(r"[^({=;<]*?([\w:]+)\s*[({=;<]", text[at:])
        if declared:
            yield declared.group(1), commas + 1
