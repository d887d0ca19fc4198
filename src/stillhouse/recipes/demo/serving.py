"""`stillhouse demo MODEL [STUDENT]`: a page in the browser, on this machine alone unless told so.

The page asks for nothing from elsewhere, and its policy admits no request but to itself.
"""

import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt

from stillhouse.config import Config
from stillhouse.engine.world import world
from stillhouse.errors import UserError, missing_extra
from stillhouse.recipes.demo.drawing import GUIDANCE, Model, first_guidance, load_models, warm
from stillhouse.recipes.demo.looking import MEGABYTES
from stillhouse.recipes.features.reading import Reading

# Scripts and styles of gradio are partly inline; nothing comes from, or goes to, another place.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class DemoRun(Config):
    """A page to try a model."""

    model: str = ""
    """A diffusers directory, a hub id, or a run's folder."""
    student: str = ""
    """A few-step student, to be shown beside it."""
    guidance: Annotated[float, Field(ge=1, le=GUIDANCE)] | None = None
    """Weight that the page begins with; None: as the student was taught, else 1, which is none."""
    size: NonNegativeInt = 0
    """Side of the square that pictures are made for features; 0: the model's own."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Where to listen; 0.0.0.0 lets in everyone who can reach this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7860
    """0: any that is free."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the models."""
    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto: a GPU where there is one."""


def run(config: DemoRun) -> None:
    """Serves the page until it is interrupted."""
    with (
        interrupted_by_sigterm(),
        TemporaryDirectory(prefix="stillhouse-demo-") as uploads,
        world(config.device) as here,
    ):
        import_gradio(Path(uploads))
        if here.size > 1:
            raise UserError("a demo is one process: run it without torchrun")
        place = listen(config.host, config.port)
        with place:
            reading = Reading(size=config.size, dtype=config.dtype)
            models = load_models(config.model, config.student, reading, here.device)
            for model in filter(None, models):
                warm(model)
            app = make_app(*models, config)
            if not is_local(config.host):
                print(
                    f"stillhouse demo: warning: everyone who can reach {config.host} can use this "
                    "page; it asks for no password",
                    file=sys.stderr,
                )
            print(
                f"stillhouse demo: open {address(place)} in a browser; Ctrl-C ends it", flush=True
            )
            serve(app, place)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C: uploads are forgotten however the demo is ended."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def import_gradio(uploads: Path) -> None:
    """Before anything of it is read from the environment: no telemetry, uploads in one folder."""
    quiet = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ |= quiet | {"GRADIO_TEMP_DIR": str(uploads)}
    try:
        import gradio  # noqa: F401
    except ImportError:
        raise missing_extra("gradio", "demo") from None


def make_app(model: Model, student: Model | None, config: DemoRun) -> Any:
    """The page as an ASGI app."""
    import gradio as gr
    from fastapi import FastAPI

    from stillhouse.recipes.demo.page import build, theme
    from stillhouse.recipes.demo.style import STYLE

    models = [model] if student is None else [model, student]
    app = FastAPI(openapi_url=None)
    gr.mount_gradio_app(
        app,
        build(models, first_guidance(student, config.guidance)),
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        max_file_size=MEGABYTES * 2**20,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        theme=theme(),
        css=STYLE,
    )
    return Guarded(app, names_of(config.host))


class Guarded:
    """An app whose answers carry the policy, and that answers to its own page alone.

    Without that, any page in the visitor's browser could speak with the demo of this machine,
    across origins or under a name of its own (DNS rebinding), and gradio would fetch any address.
    """

    def __init__(self, app: Any, names: set[str] | None) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        why = refusal(scope, self.names)
        if why and scope["type"] == "http":
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": why.encode()})
            return
        if why:
            await send({"type": "websocket.close", "code": 1008, "reason": why})
            return

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": guarded(message.get("headers", []))}
            await send(message)

        await self.app(scope, receive, answer)


def guarded(headers: Any) -> list[tuple[bytes, bytes]]:
    """With the policy, and without gradio's leave for other origins: the page needs none."""
    kept = [pair for pair in headers if not pair[0].lower().startswith(b"access-control-")]
    return [*kept, *((name.encode(), value.encode()) for name, value in HEADERS.items())]


def refusal(scope: Any, names: set[str] | None) -> str:
    """Why a request is not answered; nothing if it is."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    host, path = host_name(headers.get(b"host", "")), scope["path"]
    if names is not None and host not in names:
        return "this demo has another name"
    origin = headers.get(b"origin")
    if origin is not None and host_name(origin.partition("://")[2]) != host:
        return "this demo answers to its own page alone"
    # A link from elsewhere may open the page.
    if path != "/" and headers.get(b"sec-fetch-site") in ("cross-site", "same-site"):
        return "this demo answers to its own page alone"
    if "://" in path or "/proxy=" in path:
        return "this demo fetches nothing from elsewhere"
    return ""


def names_of(host: str) -> set[str] | None:
    """By which the demo may be asked; None: any, as it was opened to others."""
    return {"localhost", "127.0.0.1", "::1", host} if is_local(host) else None


def host_name(header: str) -> str:
    """Of a Host header: without the port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


# ---------------------------------------------------------------- listening


def is_local(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A place that is ours before the models are read."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"{host} port {port} cannot be listened on ({error.strerror}): choose another --port, "
            "or 0 for any that is free"
        ) from error


def address(place: socket.socket) -> str:
    host, port, *_ = place.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: Any, place: socket.socket) -> None:
    """Until Ctrl-C or SIGTERM, which is how a demo ends."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3))
    try:
        server.run(sockets=[place])
    except KeyboardInterrupt:
        print("\nstillhouse demo: ended")
