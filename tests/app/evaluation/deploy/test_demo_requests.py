"""Requests that `relvit demo` refuses before Gradio gets them: for other machines, too large, or malformed."""

import http.server
import json
import threading
from urllib.parse import quote

import pytest

import relvit

pytest.importorskip("gradio")

import httpx
import safehttpx
from gradio import processing_utils
from starlette.testclient import TestClient

from relvit.app.evaluation.deploy.demo_page import Viewer, build_app

NOT_OURS = "This page does not send such requests."


@pytest.fixture(scope="module")
def viewer(best):
    return Viewer(relvit.load(best), 10_000)


@pytest.fixture
def page(viewer, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    app = build_app(viewer, 1, max_total_mb=0.0625)
    with TestClient(app, base_url="http://127.0.0.1:7860", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def other(monkeypatch):
    """A server at another address of this machine; Gradio's check of addresses is switched off, so that it may ask."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"of another machine")

        def log_message(self, *arguments):
            pass

    async def get(url, **options):
        async with httpx.AsyncClient(trust_env=False) as client:
            return await client.get(url)

    monkeypatch.setattr(safehttpx, "get", get)
    monkeypatch.setattr(processing_utils.sh, "get", get)
    server = http.server.ThreadingHTTPServer(("127.0.0.2", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.2:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def functions(page):
    config = page.get("/config").json()
    return {f["api_name"]: f["id"] for f in config["dependencies"]}


def upload(page, size=100):
    return page.post("/gradio_api/upload", files={"files": ("a.png", bytes(size))})


def answer(page, body, session):
    """Return the status and the text of a request, or of the event that the request starts."""
    joined = page.post("/gradio_api/queue/join", json=body | {"session_hash": session})
    if joined.status_code != 200:
        return joined.status_code, joined.text
    stream = page.get(f"/gradio_api/queue/data?session_hash={session}").text
    (line,) = (line for line in stream.splitlines() if "process_completed" in line)
    output = json.loads(line.removeprefix("data: "))["output"]
    return 200, output.get("error") or output["data"][1]


def test_no_request_makes_the_page_fetch_an_address(page, other, tmp_path):
    address, asked = other
    file = upload(page).json()[0]
    folder = f"{tmp_path}/uploads"
    targets = [address, f"{address}/x.png", f"{address}/../..{folder}/x", address.replace("://", ":\\\\")]
    targets += [address.replace("http", scheme) for scheme in ("https", "HTTP", "ftp", "file")]
    show = functions(page)["show"]
    for number, target in enumerate(targets):
        for written in (
            target,
            quote(target, ""),
            quote(quote(target, ""), ""),
            quote(quote(quote(target, ""), ""), ""),
        ):
            for route in ("file=", "file/", "proxy=", "stream/", "custom_component/", f"file={folder}/"):
                for method in ("GET", "HEAD"):
                    assert page.request(method, f"/gradio_api/{route}{written}").status_code in (400, 403, 404)
            assert page.get(f"/gradio_api/queue/data?session_hash={written}").status_code == 400
            assert page.get(f"/gradio_api/deep_link?session_hash={written}").status_code == 400
            for value in (
                {"path": written, "meta": {"_type": "gradio.FileData"}},
                {"path": file, "url": written, "meta": {"_type": "gradio.FileData"}},
                {"path": None, "url": written, "meta": {"_type": "gradio.FileData"}},
                {"path": file, "meta": {"_type": "gradio.FileData"}, written: 1},
                [{"video": {"path": written}}],
                written,
            ):
                body = {"data": [None, value, "", [], 1, "all"], "fn_index": show}
                assert answer(page, body, f"s{number}") == (400, NOT_OURS)
    assert asked == []


def test_the_pages_own_address_of_an_upload_is_allowed(page):
    file = upload(page).json()[0]
    value = {"path": file, "meta": {"_type": "gradio.FileData"}}
    for host in ("http://127.0.0.1:7860", "https://127.0.0.1:7860"):
        body = {"data": [None, value | {"url": f"{host}/gradio_api/file={file}"}, "", [], 1, "all"]}
        assert "this image cannot be read" in answer(page, body | {"fn_index": functions(page)["show"]}, host[:5])[1]
    assert page.get(f"/gradio_api/file={file}").content == bytes(100)
    assert page.get("/gradio_api/file=/etc/hostname").status_code == 400


def test_uploads_have_a_limit_in_sum(page, tmp_path):
    # The limit is 65,536 bytes. A request has some hundred bytes besides its file.
    assert [upload(page, size).status_code for size in (31_000, 31_001, 31_002, 100)] == [200, 200, 413, 200]
    refused = upload(page, 31_002)
    assert refused.text == "All files together exceed the maximum allowed size of 0.0625 MB; try later."
    # The server reads a body in chunks to its end, whatever length is declared.
    for declared in ({}, {"content-length": "1", "transfer-encoding": "chunked"}):
        headers = {"content-type": "multipart/form-data"} | declared
        undeclared = page.post("/gradio_api/upload", content=iter([b"x"]), headers=headers)
        assert (undeclared.status_code, undeclared.text) == (411, "An upload has to declare its length.")
    assert sum(f.stat().st_size for f in tmp_path.glob("uploads/**/*.png")) == 62_101


MALFORMED = [
    {"data": [None, "FILE"]},
    {"data": "x"},
    {"data": {}},
    {},
    {"data": [None, "x", "", [], 1, "all"]},
    {"data": [None, "FILE", "", 5, 1, "all"]},
    {"data": [None, "FILE", "", ["x"], 1, "all"]},
    {"data": [None, "FILE", "", [], 77, "all"]},
    {"data": [None, "FILE", "", [], {}, [1]]},
    {"fn_index": 99},
    {"fn_index": "a"},
    {"trigger_id": "a"},
    *({"click": True, "event_data": event} for event in (None, "x", [], {}, 5, {"index": 1, "value": 1})),
    *({"click": True, "event_data": {"index": at, "value": 1}} for at in ("a", ["a", 1], [1, 1, 1], [None, 1], {})),
]


def test_malformed_events_are_answered_in_words(page, capsys):
    file = {"path": upload(page).json()[0], "meta": {"_type": "gradio.FileData"}}
    known = functions(page)
    for number, case in enumerate(MALFORMED):
        body = {"data": [None, "FILE", "", [], 1, "all"], "fn_index": known["click" if "click" in case else "show"]}
        body |= case
        if case == {}:
            del body["data"]
        if isinstance(body.get("data"), list):
            body["data"] = [file if value == "FILE" else value for value in body["data"]]
        status, text = answer(page, body, f"m{number}")
        assert (status, text.lower().rstrip(".")) in ((200, NOT_OURS.lower()[:-1]), (400, NOT_OURS.lower()[:-1])), case
    for path in ("queue/data", "cancel", "reset", "queue/join"):
        sent = page.post(f"/gradio_api/{path}", json=[1])
        assert "{" not in sent.text or sent.json() == {"detail": "Method Not Allowed"}
