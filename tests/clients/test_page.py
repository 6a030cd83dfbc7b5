# SPDX-License-Identifier: Apache-2.0
"""The page of the server in a headless Chromium. FOVEA_SCREENSHOT names a file for a picture of it."""

import json
import os
import struct

import pytest
from browser import Browser

KEY = "a-key-for-tests"


def turns(browser):
    """Returns the kind and the text of every turn."""
    return browser.script("[...document.querySelectorAll('.turn')].map(t => [t.className, t.textContent])")


def ask(browser, prompt, limit):
    browser.type("#limit", str(limit))
    browser.type("#prompt", prompt)
    browser.click("#send")


@pytest.fixture
def page(server):
    browser = Browser()
    browser.open(f"http://127.0.0.1:{server.port}/")
    yield browser
    browser.close()


def test_an_answer_streams(page, server):
    page.type("#key", KEY)
    page.script("document.getElementById('key').dispatchEvent(new Event('change'))")
    page.wait_for("document.getElementById('model').textContent === 'tiny'")
    ask(page, "Who was Noah? <b>", 60)
    page.wait_for("!document.getElementById('send').disabled && document.querySelector('.turn.assistant')")
    page.wait_for("/^[0-9.]+ tokens.s$/.test(document.getElementById('speed').textContent)")
    (user, prompt), (assistant, answer) = turns(page)
    assert (user, prompt, assistant) == ("turn user", "Who was Noah? <b>", "turn assistant")
    assert len(answer) > 20
    picture = page.screenshot()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    width, height = struct.unpack(">II", picture[16:24])
    assert width >= 800 and height >= 500
    if file := os.environ.get("FOVEA_SCREENSHOT"):
        with open(file, "wb") as output:
            output.write(picture)
    # A second message continues the conversation.
    ask(page, "And then?", 10)
    page.wait_for("!document.getElementById('send').disabled && document.querySelectorAll('.turn').length === 4")
    assert json.loads(page.script("JSON.stringify(messages.map(m => m.role))")) == ["user", "assistant"] * 2


def test_the_stop_button(page, server):
    page.type("#key", KEY)
    ask(page, "Tell me everything", 7000)
    page.wait_for("document.querySelector('.turn.assistant')?.textContent.length > 20")
    assert page.script("document.getElementById('send').disabled")
    page.click("#stop")
    page.wait_for("!document.getElementById('send').disabled && document.getElementById('stop').disabled")
    text = turns(page)[-1][1]
    headers = {"Authorization": f"Bearer {KEY}"}
    for _ in range(1000):
        if b"fovea_num_requests_running 0\n" in server.request("GET", "/metrics", None, headers)[2]:
            break
    else:
        raise AssertionError("the request still runs")
    assert turns(page)[-1] == ["turn assistant", text]


def test_errors_are_shown(page):
    ask(page, "Hello", 5)
    page.wait_for("document.querySelector('.turn.error')")
    assert turns(page)[-1] == ["turn error", "the API key is missing or unknown"]
