"""Refuse HTTP requests that the page of `relvit demo` does not send itself: other hosts, origins and files."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus, urlsplit

from gradio.route_utils import API_PREFIX
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")
# The body of a request has at most this number of bytes. This limit is not for images, which come as uploads; choices
# on the page take some hundred bytes.
LARGEST_BODY = 2**20
UPLOAD = f"{API_PREFIX}/upload"
FILE = f"{API_PREFIX}/file="
# Of Gradio's many routes the page needs only these routes and `FILE`, so requests to all other routes are refused.
ROUTES = ("upload", "upload_progress", "queue", "cancel", "reset", "heartbeat", "startup-events")
ROUTES += ("info", "app_id", "user", "token", "login_check", "theme.css")
NOT_OURS = "This page does not send such requests."


class OwnPageOnly:
    """ASGI middleware that refuses all requests except the requests that the page itself sends.

    A page of another site, open in a user's browser, may send requests to this machine. If the name of the site
    resolves to 127.0.0.1 (DNS rebinding), its requests look local. So the headers `Host` and `Origin` have to name the
    page of `relvit demo`. A request may also ask Gradio to read any file of this machine as if a user had uploaded it,
    or to fetch a web address. Therefore each file in a request has to be in the folder of uploads, and a request that
    contains a web address is refused, even if the address is percent-encoded several times. The only web address that a
    request may contain is the address at which the page shows an upload.

    Args:
        app: the application that gets the requests of the page.
        host: the address that the server listens at. If it is '0.0.0.0' or '::', `Host` may be any IP address or the
            name of this machine.
        uploads: the folder of uploaded files.
        most_bytes: largest number of bytes of all files in that folder together; uploads beyond it are refused. The
            argument `max_mb` of `build_app` limits the size of each file.
    """

    def __init__(self, app: ASGIApp, host: str, uploads: str | os.PathLike[str], most_bytes: int = 2**30) -> None:
        self.app = app
        self.host = host
        self.uploads: Path = Path(uploads)
        self.most_bytes = most_bytes
        # This counts the declared bytes of all uploads in progress, because their files may not be in the folder yet.
        self.arriving: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_own(headers):
            return await PlainTextResponse("This is not the address of the page.", 403)(scope, receive, send)
        if not self._is_of_the_page(scope["path"], scope.get("query_string", b"").decode("latin-1")):
            return await PlainTextResponse(NOT_OURS, 400)(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "POST":
            if scope["path"] == UPLOAD:
                # Do not trust the declared length of a body that is sent in chunks, which the server ignores: the body
                # may be longer.
                length = "" if "transfer-encoding" in headers else headers.get("content-length", "")
                return await self._upload(length, scope, receive, send)
            body = await _read(receive)
            if body is None or not self._names_uploads_alone(body, headers["host"]):
                return await PlainTextResponse(NOT_OURS, 400)(scope, receive, send)
            receive = _again(body, receive)
        return await self.app(scope, receive, _in_words(scope, receive, send))

    async def _upload(self, length: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept an upload if the folder has room for it; browsers always declare its length."""
        if not (length.isascii() and length.isdecimal()):
            return await PlainTextResponse("An upload has to declare its length.", 411)(scope, receive, send)
        size = int(length)
        held = sum(file.lstat().st_size for file in self.uploads.rglob("*") if not file.is_dir())
        if held + self.arriving + size > self.most_bytes:
            said = f"All files together exceed the maximum allowed size of {self.most_bytes / 2**20:g} MB; try later."
            return await PlainTextResponse(said, 413)(scope, receive, send)
        self.arriving += size
        try:
            await self.app(scope, receive, _in_words(scope, receive, send))
        finally:
            self.arriving -= size

    def _is_of_the_page(self, path: str, query: str) -> bool:
        """Check that a path is one of the page's routes or an uploaded file, without an address in it or the query."""
        if _has_address(path) or _has_address(query):
            return False
        if path.startswith(FILE):
            return self._is_upload(path.removeprefix(FILE))
        if path.startswith(f"{API_PREFIX}/"):
            return path.split("/")[2] in ROUTES
        return True

    def _is_upload(self, path: Any) -> bool:
        """Check that a value is the absolute path of a file in the folder of uploads."""
        try:
            inside = isinstance(path, str) and Path(path).resolve().is_relative_to(self.uploads.resolve())
            return inside and Path(path).is_absolute()
        # Python raises these errors for a path with a zero byte, or with links that form a loop: such a path is not an
        # upload.
        except (ValueError, OSError, RuntimeError):
            return False

    def _is_own(self, headers: Mapping[str, str]) -> bool:
        """Check that the header `Host` names the page's host, and `Origin`, if there is one, the same host."""
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

    def _names_uploads_alone(self, body: bytes, host: str) -> bool:
        """Check that all files that a request names were uploaded, and that all its addresses are those of uploads."""
        try:
            content = json.loads(body or b"null")
        except (ValueError, RecursionError):
            return False
        waiting = [content]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                if value.get("path") is not None and not self._is_upload(value["path"]):
                    return False
                waiting += [*value, *(part for name, part in value.items() if name != "url")]
                # The only address that the browser sends is the one under which it displays an upload, so refuse every
                # other address.
                own, _, path = str(value.get("url") or "").partition(FILE)
                if value.get("url") and not (own in (f"http://{host}", f"https://{host}") and self._is_upload(path)):
                    return False
            elif isinstance(value, list):
                waiting += value
            elif isinstance(value, str) and _has_address(value):
                return False
        return True


def _has_address(text: str) -> bool:
    """Check whether a text contains '://', percent-encoded any number of times or not."""
    while (decoded := unquote_plus(text)) != text:
        text = decoded
    return "://" in text.replace("\\", "/")


def _in_words(scope: Scope, receive: Receive, send: Send) -> Send:
    """Return a `send` that replaces the application's answer to a malformed request by `NOT_OURS`.

    Gradio would answer with status 422 or 500 and details of its code, which a user should not see.
    """
    refused = False

    async def words(message: Message) -> None:
        nonlocal refused
        if message["type"] == "http.response.start" and message["status"] in (422, 500):
            refused = True
            await PlainTextResponse(NOT_OURS, 400)(scope, receive, send)
        elif not refused:
            await send(message)

    return words


def _is_address(name: str) -> bool:
    """Check whether a name is an IP address, which no other site can have as its name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _read(receive: Receive) -> bytes | None:
    """Read the body of a request; None if it is longer than any body that the page sends, or if the client has gone."""
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
