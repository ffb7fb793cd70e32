"""Headless Chromium, driven by the DevTools protocol over a WebSocket."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
_KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
_START_S = 60.0
_ANSWER_S = 60.0


@dataclass
class Tab:
    """One page, and what happened in it since its beginning."""

    connection: ClientConnection
    requested: list[str] = field(default_factory=list)
    """Addresses of all requests."""
    errors: list[str] = field(default_factory=list)
    """Errors and warnings of the console, exceptions, and what the page's policy refused."""
    expected: str | None = None
    """Pattern of messages of the console that are no errors, such as Chromium's about an answer's status."""
    _last_id: int = 0

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol; raises AssertionError with its error."""
        self._last_id += 1
        self.connection.send(json.dumps({"id": self._last_id, "method": method, "params": params}))
        while True:
            message = json.loads(self.connection.recv(timeout=_ANSWER_S))
            self._note(message)
            if message.get("id") == self._last_id:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            text = f"{params['entry']['text']} {params['entry'].get('url', '')}"
            if self.expected is None or not re.search(self.expected, text):
                self.errors.append(text)

    def hosts(self) -> set[str]:
        """Of all requests that left the page."""
        addresses = (urlsplit(url) for url in self.requested)
        return {address.hostname or "" for address in addresses if address.scheme not in ("data", "about", "file")}

    def close(self) -> None:
        self.send("Page.close")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        params = {"expression": script, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", **params)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 30.0) -> None:
        """Until the expression is true."""
        self.wait_for(lambda: bool(self.run(f"Boolean({condition})")), condition, timeout_s)

    def wait_for(self, condition: Callable[[], bool], words: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {words}\n{self.errors}"
            time.sleep(0.05)

    def set_size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)

    def set_media(self, **features: str) -> None:
        """`prefers_color_scheme="dark"` and the like."""
        given = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", features=given)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            pressed = {"key": key, "code": key, "windowsVirtualKeyCode": _KEY_CODES[key]}
            self.send("Input.dispatchKeyEvent", type=kind, **pressed, **({"text": "\r"} if key == "Enter" else {}))

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])


@contextmanager
def chromium() -> Iterator[Callable[[], Tab]]:
    """Starts the browser; yields a function that opens an empty tab."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="toka-chromium-", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # a proxy of the machine must not see requests to the server under test
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=environment)
        try:
            port = _debugging_port(Path(profile), process)
            with ExitStack() as tabs:
                yield lambda: tabs.enter_context(_opened_tab(port))
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _debugging_port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + _START_S
    path = profile / "DevToolsActivePort"
    while not (path.exists() and path.read_text().count("\n") >= 1):
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        assert time.monotonic() < deadline, "Chromium did not start"
        time.sleep(0.05)
    return int(path.read_text().split()[0])


@contextmanager
def _opened_tab(port: int) -> Iterator[Tab]:
    request = Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
    with urlopen(request, timeout=_ANSWER_S) as answer:
        address = json.load(answer)["webSocketDebuggerUrl"]
    # close_timeout: a tab that is closed does not answer.
    with connect(address, max_size=None, max_queue=None, proxy=None, compression=None, close_timeout=0.5) as connection:
        tab = Tab(connection)
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            tab.send(f"{domain}.enable")
        yield tab
