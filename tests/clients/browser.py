# SPDX-License-Identifier: Apache-2.0
"""Drives a headless Chromium through chromedriver's HTTP interface (W3C WebDriver)."""

import base64
import http.client
import json
import re
import subprocess
import time

SECONDS = 60  # max time of anything on a busy machine
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=900,700"]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's key of an element's id


class Browser:
    def __init__(self):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in self.driver.stdout:
            if match := re.search(r"started successfully on port (\d+)", line):
                self.port = int(match.group(1))
                break
        else:
            raise AssertionError("chromedriver did not start")
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": OPTIONS}}
        self.session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"{path}: {value['error']}: {value['message']}")
        return value

    def command(self, method, path, body=None):
        return self.call(method, f"/session/{self.session}{path}", body)

    def open(self, url):
        self.command("POST", "/url", {"url": url})

    def _element(self, selector):
        return self.command("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def type(self, selector, text):
        """Replaces the text of an input."""
        element = self._element(selector)
        self.command("POST", f"/element/{element}/clear", {})
        self.command("POST", f"/element/{element}/value", {"text": text})

    def click(self, selector):
        self.command("POST", f"/element/{self._element(selector)}/click", {})

    def script(self, text):
        """Returns the value of a JavaScript expression."""
        return self.command("POST", "/execute/sync", {"script": f"return {text}", "args": []})

    def wait_for(self, text):
        end = time.monotonic() + SECONDS
        while not (value := self.script(text)):
            if time.monotonic() > end:
                raise AssertionError(f"not true: {text}")
            time.sleep(0.01)
        return value

    def screenshot(self):
        """Returns a PNG."""
        return base64.b64decode(self.command("GET", "/screenshot"))

    def close(self):
        self.command("DELETE", "")
        self.driver.terminate()
        self.driver.wait(SECONDS)
