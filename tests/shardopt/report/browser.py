"""A headless Chromium, driven over its debugging pipe; no more than what looking at a page takes.

The protocol is Chrome's DevTools Protocol: JSON messages that end in a NUL, over the descriptors 3
(to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 60.0
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in zip((3, 4), ends):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the pipes where the browser looks for them."""


def find_browser() -> str | None:
    """The first of the usual names on the PATH, or what SHARDOPT_BROWSER names."""
    named = os.environ.get("SHARDOPT_BROWSER")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in one browser; what the page logs as an error is kept in ``errors``."""

    def __init__(self, program: str, profile: Path) -> None:
        self.program = program
        self.profile = profile
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._ids = itertools.count(1)
        self._buffer = b""
        self._loaded = False
        self._session: str | None = None

    def __enter__(self) -> Self:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",  # as root in a container there is none to be had
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={self.profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                str(to_browser),
                str(from_browser),
                self.program,
                *flags,
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(
        self, path: Path, *, width: int = 1400, height: int = 1000, dark: bool = False
    ) -> None:
        """Open a file and wait until it has loaded."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._take(self._receive())

    def resize(self, width: int, height: int) -> None:
        """Another window."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element, scrolled into sight."""
        self._mouse(("mousePressed", "mouseReleased"), selector)

    def point(self, selector: str) -> None:
        """Move the mouse over an element."""
        self._mouse(("mouseMoved",), selector)

    def _mouse(self, kinds: tuple[str, ...], selector: str) -> None:
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in kinds:
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self._call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """All of the page, as PNG."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                found: dict[str, Any] = answer["result"]
                return found
            self._take(answer)

    def _take(self, message: dict[str, Any]) -> None:
        """An event: errors and requests are kept."""
        method, what = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.errors.append(str(what["args"]))
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.errors.append(what["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._in], [], [], max(0.0, left))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError(f"{self.program} does not answer")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found
