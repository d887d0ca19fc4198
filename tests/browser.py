"""The browser of the tests: Chromium, without further packages."""

import base64
import fcntl
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any


class Browser:
    """Chromium without a window, spoken to through pipes in its own protocol."""

    def __init__(self, program: str, folder: Path) -> None:
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (their_in, their_out)]  # not 3 or 4
        os.close(their_in)
        os.close(their_out)
        options = (
            "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run "
            "--remote-debugging-pipe"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{fds[0]} 4>&{fds[1]}', program, *options.split(),
             f"--user-data-dir={folder}", "about:blank"],
            pass_fds=fds, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in fds:
            os.close(fd)
        self._count, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], 60)[0], "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has gone"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def open(
        self, file: Path, *, width: int = 1200, dark: bool = False, scripts: bool = True
    ) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, code: str) -> Any:
        answer = self("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def point(self, x: float, y: float) -> None:
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, target: Path) -> None:
        picture = self("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        target.write_bytes(base64.b64decode(picture))

    def complaints(self) -> list[dict[str, Any]]:
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in bad]

    def requests(self) -> list[str]:
        sent = [
            event for event in self.events if event.get("method") == "Network.requestWillBeSent"
        ]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        try:
            self._session = ""
            self("Browser.close")
            self._process.wait(10)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._in)
            os.close(self._out)
