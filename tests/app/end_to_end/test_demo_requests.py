"""`relvit demo` over HTTP: a visit without a browser, and requests for other files of the machine."""

import http.client
import io
import json
import os
import random
import re
import signal

import numpy as np
import pytest
from PIL import Image
from processes import finish, start

import relvit

pytest.importorskip("gradio")

pytestmark = pytest.mark.slow

SECRET = "the secret of the machine"
SEED = 31
# Besides one request for each function, input and way to call, the test makes this number of requests with random file
# names.
DRAWN = 60
OPTIONS = [["attention"], 1, "all"]


class Visitor:
    """A client that sends requests to the page and remembers all answers."""

    def __init__(self, address):
        self.address = address
        self.host, port = address.removeprefix("http://").split(":")
        self.port = int(port)
        self.received = []

    def request(self, method, path, body=None, headers=()):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        sent = {"Content-Type": "application/json"} | dict(headers)
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        self.received.append(content)
        return response.status, content

    def post(self, path, content, headers=()):
        return self.request("POST", f"/gradio_api/{path}", json.dumps(content), headers)

    def upload(self, name, content):
        boundary = "0123456789abcdef"
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        status, content = self.request("POST", "/gradio_api/upload", body, kind)
        assert status == 200
        (path,) = json.loads(content)
        return {"path": path, "meta": {"_type": "gradio.FileData"}}

    def call(self, function, data, session="visit", event=None):
        """Return the outputs of a function of the page, or None if it refuses or fails."""
        body = {"data": data, "fn_index": function, "session_hash": session, "event_data": event}
        status, _ = self.post("queue/join", body)
        if status != 200:
            return None
        _, stream = self.request("GET", f"/gradio_api/queue/data?session_hash={session}")
        for line in stream.decode().splitlines():
            message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if message.get("msg") == "process_completed":
                return message["output"].get("data")
        return None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The command's working folder, with temporary files and a false Ghostscript that would create a marker."""
    place = tmp_path_factory.mktemp("place")
    for name in ("bin", "files"):
        (place / name).mkdir()
    (place / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {place / 'ghostscript'}\n")
    (place / "bin" / "gs").chmod(0o755)
    return place


@pytest.fixture(scope="module")
def page(run, place):
    """The address of the page; only the port differs from the command's defaults."""
    env = {"TMPDIR": str(place / "files"), "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    process = start(["demo", run / "checkpoints" / "best.ckpt", "--port", "0"], place, env=env)
    yield re.search(r"http://\S+:\d+", process.stdout.readline())[0]
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 0
    assert not (place / "ghostscript").exists()


@pytest.fixture
def visitor(page):
    return Visitor(page)


def picture(size, kind="PNG", mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, size, 0).save(file, kind)
    return file.getvalue()


def functions(visitor):
    """Return the number of each function of the page and the count of its inputs, by name."""
    config = json.loads(visitor.request("GET", "/config")[1])
    return {(f["api_name"] or str(f["id"])): (f["id"], len(f["inputs"])) for f in config["dependencies"]}


def test_a_visit_by_requests(visitor, run, photos):
    show, click = functions(visitor)["show"][0], functions(visitor)["click"][0]
    photo = photos / "test" / "owl" / "0.jpg"
    upload = visitor.upload("photo.jpg", photo.read_bytes())
    _, text, seen, classes, *_ = visitor.call(show, [None, upload, "24 x 40", *OPTIONS])
    assert "3 x 5 patches; now row 1, column 2" in text
    expected = relvit.load(run / "checkpoints" / "best.ckpt", (24, 40)).predict(photo)
    assert {one["label"]: one["confidence"] for one in classes["confidences"]} == pytest.approx(
        dict(zip(expected.names, expected.probabilities, strict=True))
    )
    # The page serves a picture that it has made.
    status, content = visitor.request("GET", seen["url"].removeprefix(visitor.address))
    assert status == 200
    assert Image.open(io.BytesIO(content)).size == (480, 288)
    _, _, text, *_ = visitor.call(click, [None, upload, "24 x 40", *OPTIONS], event={"index": [470, 10], "value": None})
    assert "now row 0, column 4" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("large.png", picture((13_000, 13_000), mode="1"), "it has 13000 x 13000 pixels, the most are 50,000,000"),
        ("figure.png", picture((20, 30), "EPS"), "it is not an image, or of an unknown format"),
        ("figure.eps", picture((20, 30), "EPS"), "it is not an image, or of an unknown format"),
        ("drawn.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>", "it is not an image"),
        ("icon.png", picture((16, 16), "ICO"), "it is not an image, or of an unknown format"),
        ("good.webp", picture((20, 30), "WEBP"), "The model sees 16 x 16 px"),
        ("good.tif", picture((20, 30), "TIFF"), "The model sees 16 x 16 px"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[-5:] else "",
)
def test_sizes_and_formats(visitor, name, content, message):
    show = functions(visitor)["show"][0]
    _, text, *_ = visitor.call(show, [None, visitor.upload(name, content), "", *OPTIONS])
    assert message in text
    assert "/" not in text.replace("</p>", "")


def test_no_request_gets_a_file_of_the_machine(visitor, place):
    secret = place / "secret.txt"
    secret.write_text(SECRET)
    picture_file = place / "secret.png"
    values = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(values).save(picture_file)
    (folder,) = (place / "files").glob("relvit-demo-*")
    (folder / "link").symlink_to(secret)
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    targets = [str(secret), str(picture_file), "/etc/passwd", f"file://{secret}", f"{folder}/../../{secret.name}"]
    targets += [str(folder / "link"), f"{visitor.address}/config", "http://localhost:1/x", "secret.txt", "", "\0"]
    found = functions(visitor)

    def file_data(path):
        return {"path": path, "url": chance.choice((None, path)), "meta": {"_type": "gradio.FileData"}}

    calls = [(f, at, str(secret)) for f in found.values() for at in range(f[1])]
    calls += [
        (f, chance.randrange(f[1]), chance.choice(targets)) for f in chance.choices(list(found.values()), k=DRAWN)
    ]
    for number, ((function, count), at, target) in enumerate(calls):
        value = file_data(target)
        value = chance.choice((value, [value], {"value": value}, {"image": value, "path": None}))
        data = [None] * count
        data[at] = value
        assert visitor.call(function, data, f"s{number}", {"index": [1, 1], "value": value}) is None
        body = {"data": data, "fn_index": function, "session_hash": f"r{number}"}
        for path in ("run/predict", "run/show", "api/click", "call/show", "run/upload", "queue/join/upload"):
            visitor.post(path, body)
    # The answers contain no path of the machine, except a path that the request's address itself contains.
    assert not [content for content in visitor.received if str(place).encode() in content]
    for target in targets:
        for path in ("file=", "file/", "proxy=", "stream/", "custom_component/"):
            name = target.replace("\0", "%00").replace(" ", "%20")
            visitor.request("GET", f"/gradio_api/{path}{name}")
    # Request every file that the page has named in its answers.
    for content in list(visitor.received):
        for path in re.findall(rb'"path": ?"([^"]+)"', content):
            visitor.request("GET", "/gradio_api/file=" + path.decode("ascii", "ignore"))
    for content in visitor.received:
        assert SECRET.encode() not in content
        assert b"root:x:0:0" not in content
        assert picture_file.read_bytes()[16:] not in content
    assert not list(folder.rglob("secret*"))


def test_requests_of_other_sites_are_refused(visitor):
    show = {"data": [None, None, "", *OPTIONS], "fn_index": functions(visitor)["show"][0], "session_hash": "x"}
    for headers, status in (
        ({}, 200),
        ({"Origin": visitor.address}, 200),
        ({"Origin": "http://evil.example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": f"rebound.example.org:{visitor.port}"}, 403),
    ):
        assert visitor.post("queue/join", show, headers)[0] == status
    status, _ = visitor.request("POST", "/gradio_api/queue/join", b" " * (2**20 + 1))
    assert status == 400
