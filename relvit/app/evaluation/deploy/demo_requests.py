"""Refuse HTTP requests that the page of `relvit demo` does not send itself: other hosts, origins and files."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gradio.route_utils import API_PREFIX
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")
# The choices on the page take some hundred bytes; images come as uploads.
LARGEST_BODY = 2**20
UPLOAD = f"{API_PREFIX}/upload"


class OwnPageOnly:
    """ASGI middleware that lets only requests of the page itself through.

    A page of another site may send requests to an address of this machine, and a name of its own that resolves to
    127.0.0.1 (DNS rebinding) makes these requests look local, so the headers `Host` and `Origin` have to name the
    page. A request may ask Gradio to take any file of the machine for an uploaded one, or to fetch an address, so
    every file in a request has to be one of the folder of uploads.

    Args:
        app: the application behind.
        host: the address that the server listens at. At '0.0.0.0' and '::' every IP address and the name of the
            machine are the page's own.
        uploads: the folder of uploaded files.
    """

    def __init__(self, app: ASGIApp, host: str, uploads: str | os.PathLike[str]) -> None:
        self.app = app
        self.host = host
        self.uploads: Path = Path(uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_own(headers):
            return await PlainTextResponse("This is not the address of the page.", 403)(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] != UPLOAD:
            body = await _read(receive)
            if body is None or not self._names_uploads_alone(body):
                return await PlainTextResponse("This request is not one of the page.", 400)(scope, receive, send)
            receive = _again(body, receive)
        return await self.app(scope, receive, send)

    def _is_own(self, headers: Mapping[str, str]) -> bool:
        """Check that the host is the page's, and that the origin, if there is one, is the same."""
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            same = origin is None or urlsplit(origin).netloc == host
        except ValueError:
            return False
        if not same:
            return False
        if name in (*THIS_MACHINE, self.host):
            return True
        return self.host in EVERY_ADDRESS and (_is_address(name) or name == socket.gethostname().lower())

    def _names_uploads_alone(self, body: bytes) -> bool:
        """Check that all files that a request names were uploaded."""
        try:
            content = json.loads(body or b"null")
        except (ValueError, RecursionError):
            return False
        root = self.uploads.resolve()
        for path in _paths(content):
            try:
                if not (isinstance(path, str) and Path(path).resolve().is_relative_to(root)):
                    return False
            # The name has a zero byte, or there is a loop of links.
            except (ValueError, OSError, RuntimeError):
                return False
        return True


def _paths(content: Any) -> Iterator[Any]:
    """Yield every value of the name 'path' in nested dictionaries and lists, except None."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value.get("path") is not None:
                yield value["path"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _is_address(name: str) -> bool:
    """Check whether a name is an IP address, which no other site can have as its name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _read(receive: Receive) -> bytes | None:
    """Read the body of a request; None if it is longer than any of the page's own, or if the client has gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > LARGEST_BODY:
            return None
        if not message.get("more_body", False):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body that has been read, and then the further messages of the client."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first_the_body() -> Message:
        return waiting.pop() if waiting else await receive()

    return first_the_body
