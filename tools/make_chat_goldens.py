#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes testdata/chat/goldens.json: the text that the PyPI package `transformers` renders from each chat
template in that folder. The test that reads it needs no Python.

Each template is a copy of the template of the model that it is named after. The two of Mistral are
exceptions: they imitate the model's template.
"""
import datetime
import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

CHAT = pathlib.Path(__file__).resolve().parent.parent / "testdata" / "chat"
# (system message, user message)
PROMPTS = [(None, "What is 2 + 2?"), ("Be brief.", "Hi"), (None, ""), ("", ""),
           ("  Be brief.\n ", "\u00a0 spaced \n\u3000\x1f"), ('"quoted" {{x}}', "a\nb <|im_end|>")]


def render(template, system, user):
    """Returns the text with today's date as {today}, or None if the template refuses the messages."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": user})
    try:
        texts, _ = render_jinja_template(conversations=[messages], chat_template=template,
                                         add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
    except Exception:  # raise_exception() in a template throws exceptions of several types
        return None
    return texts[0].replace(datetime.date.today().strftime("%d %b %Y"), "{today}")


def main():
    goldens = {"prompts": [{"system": system, "user": user} for system, user in PROMPTS], "texts": {}}
    for path in sorted(CHAT.glob("*.jinja")):
        goldens["texts"][path.stem] = [render(path.read_text(), *prompt) for prompt in PROMPTS]
    (CHAT / "goldens.json").write_text(json.dumps(goldens, ensure_ascii=True, indent=1) + "\n")


if __name__ == "__main__":
    main()
