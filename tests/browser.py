"""A page in headless Chromium, spoken to by its DevTools protocol over a pipe: no package needed, no port opened."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-component-update",
         "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe")


class Page:
    """An open page. `said` collects what its console and its exceptions said, `asked` the addresses that it asked for."""

    def __init__(self, write: int, read: int) -> None:
        self._out, self._in = os.fdopen(write, "wb", buffering=0), os.fdopen(read, "rb", buffering=0)
        self._sent, self._session, self._rest = 0, None, b""
        self.said: list[str] = []
        self.asked: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer. RuntimeError where Chromium refuses it."""
        self._sent += 1
        session = {"sessionId": self._session} if self._session else {}
        self._out.write(json.dumps({"id": self._sent, "method": method, "params": parameters, **session}).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def open(self, path: Path, width: int = 1400, height: int = 900, **media: str) -> Page:
        """Load a file and wait until it is there; `media` emulates features, dashes as underscores: prefers_color_scheme="dark"."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": k.replace("_", "-"), "value": v} for k, v in media.items()])
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()
        return self

    def run(self, script: str) -> Any:
        """The value of an expression, of what it promises where it is a promise. RuntimeError where it throws."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def leave(self, script: str) -> None:
        """Run what leads to another page, and wait until that is there."""
        self._loaded = False
        self.run(script)
        while not self._loaded:
            self._next()

    def press(self, key: str) -> None:
        """One key, as the keyboard sends it."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def screenshot(self, path: Path, selector: str = "body") -> None:
        """A PNG of one element."""
        box = self.run(f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
                       " return {x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height}; })()")
        shot = self.call("Page.captureScreenshot", clip={**box, "scale": 1}, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = self._in.read(1 << 20)
            if not chunk:
                raise RuntimeError("Chromium has ended")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, found: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(a.get("value", a.get("description"))) for a in found["args"]))
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(found["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.said.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(found["request"]["url"])


@contextmanager
def browser(chromium: str, profile: Path) -> Iterator[Page]:
    """A fresh Chromium, ended afterwards."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def wire() -> None:  # Chromium reads commands from 3 and answers on 4
        os.dup2(to_read, 10)
        os.dup2(from_write, 11)
        os.dup2(10, 3)
        os.dup2(11, 4)
        for number in (3, 4):
            os.set_inheritable(number, True)

    process = subprocess.Popen([chromium, *FLAGS, f"--user-data-dir={profile}"], preexec_fn=wire, close_fds=False,
                               stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(to_write, from_read)
    finally:
        process.terminate()
        process.wait(timeout=30)
