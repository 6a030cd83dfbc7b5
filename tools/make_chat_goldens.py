#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes testdata/chat/goldens.json: the texts that the PyPI package `transformers` renders from each chat template in
that folder, for each conversation of conversations.json, without and with the beginning of an answer. Writes
snippets.json: the texts of the small templates in snippets.txt. The tests that read them need no Python.

The templates deepseekv3, gemma, gemma3, llama3, llama3_2, phi3, qwen2_5, qwen3 and smollm2 are copies of those of the
models that they are named after; the others imitate a model's template.
"""
import datetime
import json
import pathlib

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

CHAT = pathlib.Path(__file__).resolve().parent.parent / "testdata" / "chat"
# Formats of the dates that templates write. Goldens have the format in braces instead of today's date.
DATES = ["%d %b %Y", "%Y-%m-%d", "%B %d, %Y"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template, conversation, tools, add_generation_prompt):
    """Returns the text, or None if the template refuses the conversation."""
    variables = TOKENS | conversation.get("variables", {})
    try:
        texts, _ = render_jinja_template(
            conversations=[conversation["messages"]], tools=tools if conversation.get("tools") else None,
            documents=variables.pop("documents", None), chat_template=template,
            continue_final_message=conversation.get("continue_final_message", False),
            add_generation_prompt=add_generation_prompt, **variables)
    except Exception:  # exceptions of several types come from raise_exception() and from wrong types
        return None
    text = texts[0]
    for form in DATES:
        text = text.replace(datetime.date.today().strftime(form), "{" + form + "}")
    return text


def render_snippet(source, variables):
    """Returns the text, or None if the template has an error."""
    try:
        return _compile_jinja_template(source).render(**variables)
    except Exception:  # exceptions of several types come from wrong types
        return None


def write(name, data):
    (CHAT / name).write_text(json.dumps(data, ensure_ascii=True, indent=1) + "\n")


def main():
    users = [{"name": "Al", "age": 31, "tags": ["x"]}, {"name": "Bo", "age": 27, "tags": ["y", "z"]},
             {"name": "Cy", "age": 40, "tags": [0]}]
    variables = {"users": users, "user": {"name": "Di", "tags": ["p", "q"]}}
    snippets = (CHAT / "snippets.txt").read_text(encoding="utf-8").splitlines()
    write("snippets.json", {"variables": variables,
                            "snippets": [[source, render_snippet(source, variables)] for source in snippets]})
    given = json.loads((CHAT / "conversations.json").read_text(encoding="utf-8"))
    goldens = {}
    for path in sorted(CHAT.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        goldens[path.stem] = {
            conversation["name"]: [render(template, conversation, given["tools"], answer) for answer in (False, True)]
            for conversation in given["conversations"]}
    write("goldens.json", goldens)


if __name__ == "__main__":
    main()
