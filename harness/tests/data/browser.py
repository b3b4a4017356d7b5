"""browser.py: a page in headless Chromium, over the pipe of its DevTools protocol.

with Browser() as b:
    page = b.open(path, width=1400)     Page: .run(js) -> value, .console, .png(file), .pdf(file)

program() -> path of a Chromium, or None ($DP_CHROMIUM, else the usual names on the PATH).
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT = "60s"  # of one test: started under timeout(1), so that nothing is left running


def program() -> str | None:
    named = os.environ.get("DP_CHROMIUM")
    return named or next((p for p in map(shutil.which, NAMES) if p), None)


class Browser:
    def __init__(self, limit: str = LIMIT) -> None:
        self.folder = tempfile.mkdtemp(prefix="deltaproof-browser-")
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        command = [
            *("timeout", "-k", "5", limit, program() or NAMES[0]),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
            *("--remote-debugging-pipe", f"--user-data-dir={self.folder}", "about:blank"),
        ]

        def pipes() -> None:  # the protocol is spoken on descriptors 3 and 4
            a, b = os.dup(to_child), os.dup(from_child)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self._process = subprocess.Popen(
            command,
            preexec_fn=pipes,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._number, self._left, self.listeners = 0, b"", []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._read, 1 << 20)
            if not more:
                raise SystemExit("the browser ended")
            self._left += more
        one, self._left = self._left.split(b"\0", 1)
        m = json.loads(one)
        for listener in self.listeners:
            listener(m)
        return m

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        m: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            m["sessionId"] = session
        os.write(self._write, json.dumps(m).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == m["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self._message()

    def open(self, path: str, width: int, height: int = 1000, dark: bool = False) -> "Page":
        return Page(self, Path(path).resolve().as_uri(), width, height, dark)


class Page:
    def __init__(self, browser: Browser, url: str, width: int, height: int, dark: bool) -> None:
        self.browser, self.console, self.loaded = browser, [], False
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        browser.listeners.append(self._listen)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        browser.wait(lambda: self.loaded)
        # The table of results stands when the script says so.
        self.run(
            "new Promise(done => { let n = 0; const t = setInterval(() => { if (n++ > 500 ||"
            " document.documentElement.dataset.ready || !document.getElementById('data'))"
            " { clearInterval(t); done(1); } }, 20); })"
        )

    def _listen(self, m: dict[str, Any]) -> None:
        if m.get("sessionId") != self.session or "method" not in m:
            return
        if m["method"] == "Page.loadEventFired":
            self.loaded = True
        if m["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.console.append(json.dumps(m["params"])[:400])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def run(self, js: str) -> Any:
        """Value of an expression; a promise's when it is kept."""
        out = self.call("Runtime.evaluate", expression=js, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in out:
            raise RuntimeError(json.dumps(out["exceptionDetails"])[:600])
        return out["result"].get("value")

    def key(self, name: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            code = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
            self.call("Input.dispatchKeyEvent", type=kind, **code, **more)

    def png(self, path: str, whole: bool = True, clip: dict[str, float] | None = None) -> None:
        more = {"clip": clip} if clip else {}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **more)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: str) -> None:
        shot = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
