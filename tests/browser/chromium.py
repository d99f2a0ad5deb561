"""A headless Chromium, driven by the DevTools protocol over a pipe. It needs no package besides Debian's chromium."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
    "--remote-debugging-pipe", "about:blank",
)  # fmt: skip
SECONDS = 60.0  # to wait for an answer at most


@dataclass
class Visit:
    """What happened while a page was shown."""

    requests: list[str] = field(default_factory=list)  # addresses other than that of the page itself
    messages: list[str] = field(default_factory=list)  # of the console, errors and warnings of any kind
    width: float = 0.0  # of the content
    window: float = 0.0  # width of the window
    smallest_text: float = 0.0  # pixels, in pictures too
    facts: dict[str, Any] = field(default_factory=dict)


class Chromium:
    """A browser with one page."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._number, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        self.session = ""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, event: str) -> None:
        """Wait until an event of this name has arrived."""
        end = time.monotonic() + SECONDS
        while not any(each.get("method") == event for each in self.events):
            self.events.append(self._next(end))

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select([self._reading], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer in {SECONDS:g} seconds.")
            part = os.read(self._reading, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended.")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def browser() -> Iterator[Chromium]:
    """Start Chromium with a new profile, and end it at last."""
    program = next((path for path in map(shutil.which, NAMES) if path), None)
    if program is None:
        raise RuntimeError("Chromium is not installed: apt-get install chromium (Debian), or brew install chromium.")
    to_read, to_write = os.pipe(), os.pipe()

    def place() -> None:  # Chromium reads commands from descriptor 3 and writes answers to descriptor 4
        high = [os.dup2(to_write[0], 100), os.dup2(to_read[1], 101)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, f"--user-data-dir={profile}", *OPTIONS], pass_fds=(3, 4), preexec_fn=place,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_write[0])
        os.close(to_read[1])
        try:
            page = Chromium(to_read[0], to_write[1])
            targets = page.call("Target.getTargets")["targetInfos"]
            target = next(each["targetId"] for each in targets if each["type"] == "page")
            page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            yield page
        finally:
            process.terminate()
            process.wait(SECONDS)
            os.close(to_read[0])
            os.close(to_write[1])


SMALLEST = """(() => {
  const scale = e => e.ownerSVGElement
    ? e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width : 1;
  const written = e => [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())
    && !['SCRIPT', 'STYLE', 'title'].includes(e.tagName) && e.getClientRects().length;
  const all = [...document.querySelectorAll('body *')].filter(written);
  return Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize) * scale(e)));
})()"""
FACTS = """({ids: (() => {const all = [...document.querySelectorAll('[id]')].map(e => e.id);
  return all.length - new Set(all).size})(),
  unnamed: [...document.querySelectorAll('img:not([alt]), figure svg:not([role=img])')].length,
  figures: document.querySelectorAll('figure svg').length,
  captions: [...document.querySelectorAll('table')].every(t => t.caption),
  background: getComputedStyle(document.body).backgroundColor,
  numbers: Object.keys(JSON.parse(document.getElementById('numbers').textContent))})"""


def visit(page: Chromium, path: Path, width: int, dark: bool, screenshot: Path) -> Visit:
    """Show a page at this width, write a picture of all of it, and return what happened."""
    page.events.clear()
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.call("Emulation.setEmulatedMedia", features=[scheme])
    address = path.resolve().as_uri()
    page.call("Page.navigate", url=address)
    page.wait_for("Page.loadEventFired")
    page.value("document.querySelectorAll('details').forEach(each => each.open = true)")  # they are judged too
    seen = Visit(facts=page.value(FACTS), width=page.value("document.documentElement.scrollWidth"))
    seen.window, seen.smallest_text = page.value("window.innerWidth"), page.value(SMALLEST)
    height = min(8000, int(page.value("document.documentElement.scrollHeight")))
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    image = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    screenshot.write_bytes(base64.b64decode(image["data"]))
    for event in page.events:
        _note(seen, event.get("method", ""), event.get("params", {}), address)
    return seen


def _note(seen: Visit, method: str, event: dict[str, Any], address: str) -> None:
    """Add an event to the visit, if it is a request or a message."""
    if method == "Network.requestWillBeSent" and event["request"]["url"] != address:
        if not event["request"]["url"].startswith("data:"):
            seen.requests.append(event["request"]["url"])
    elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
        seen.messages.append(json.dumps(event))
