"""The page of `relvit demo` without a browser: same numbers as `Predictor` and the functions for pictures."""

import re

import numpy as np
import pytest
from command_line import write_checkpoint_like
from PIL import Image

import relvit
from relvit.app.evaluation.pictures import KINDS, draw
from relvit.app.evaluation.pictures.draw import first_kinds
from relvit.app.plots import picture_of
from relvit.app.training.labels import SeveralLabels

gr = pytest.importorskip("gradio")

from starlette.testclient import TestClient  # noqa: E402

from relvit.app.evaluation.deploy.demo_page import LABELS, Viewer, build_app, build_page  # noqa: E402

# The picture is 36 px high and 24 px wide. Resized to a longer side of 48 px, it has 6 x 4 patches of 8 px.
PICTURE = np.random.default_rng(0).integers(0, 255, (36, 24, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Let Gradio keep files in the test's folder, not in a folder that all users share."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))


@pytest.fixture
def photo(tmp_path):
    Image.fromarray(PICTURE).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


@pytest.fixture(scope="module")
def viewer(best):
    return Viewer(relvit.load(best), 10_000)


def functions(page):
    """Return the functions behind the events of the page, by name."""
    return {event.name: event.fn for event in page.fns.values()}


@pytest.mark.parametrize(
    ("size", "img_size"), [("", (16, 16)), ("24 x 40", (24, 40)), ("24,40", (24, 40)), ("48", (48, 32)), ("9", (8, 8))]
)
def test_classes_are_those_of_the_predictor(viewer, best, photo, size, img_size):
    view = viewer.look(photo, size)
    expected = relvit.load(best, img_size).predict(photo)
    assert view.classes == dict(zip(expected.names, expected.probabilities, strict=True))
    rows, columns = img_size[0] // 8, img_size[1] // 8
    (text,) = view.text
    assert text == (
        f"The model sees {img_size[0]} x {img_size[1]} px, trained at 16 x 16 px. "
        f"Click on one of {rows} x {columns} patches; now row {rows // 2}, column {columns // 2}, from 0."
    )


def test_labels_that_reach_their_thresholds_are_marked(best, photo):
    clf = relvit.load(best)
    clf.classifier.labels = SeveralLabels([0.0, 0.0, 0.0])
    shares = clf.predict(photo)
    least = dict(zip(shares.names, (1.0, *shares.probabilities[1:2], 0.0), strict=True))
    clf.classifier.labels = SeveralLabels([least[name] for name in clf.class_names])
    assert list(Viewer(clf, 10_000).look(photo).classes) == [
        f"{name} ✓" if name in clf.predict(photo).names else name for name in shares.names
    ]
    assert clf.predict(photo).names == shares.names[1:]


def test_pictures_are_those_of_draw_for_the_patch_layer_and_head(viewer, best, photo):
    kinds = ("attention", "kernels", "tables", "rollout")
    view = viewer.look(photo, "24 x 40", (0.99, 0.3), kinds, layer=0, head=1)
    clf = relvit.load(best, (24, 40))
    image = clf.transform(Image.open(photo))
    picture = picture_of(image, clf.mean, clf.std, 480)
    # The image has 3 x 5 patches.
    options = {"patch": (2, 1), "layer": 0, "head": 1}
    left_out = {"tables": ("patch", "head"), "rollout": ("layer", "head")}
    for kind in kinds:
        given = {name: value for name, value in options.items() if name not in left_out.get(kind, ())}
        figure = draw(kind, clf.model, image, picture, class_names=clf.class_names, **given)
        figure.canvas.draw()
        np.testing.assert_array_equal(view.figures[kind], np.asarray(figure.canvas.buffer_rgba())[..., :3])
    # The image of 40 px is enlarged 12 times, so the frame is around rows 192 to 287 and columns 96 to 191.
    framed = np.asarray(view.picture)
    assert framed.shape == (24 * 12, 40 * 12, 3)
    red = (framed == (255, 0, 0)).all(-1)
    assert (np.flatnonzero(red.any(1))[[0, -1]] == (192, 287)).all()
    assert (np.flatnonzero(red.any(0))[[0, -1]] == (96, 191)).all()


def test_a_picture_that_a_model_does_not_have_is_said_in_words(best, photo, tmp_path):
    options = {"patch_size": 8, "embed_dim": 16, "depth": 1}
    ckpt = write_checkpoint_like(best, tmp_path / "aft.ckpt", "test_relvit_aft", options)
    viewer = Viewer(relvit.load(ckpt), 10_000)
    assert first_kinds(viewer.predictor.model) == ["attention", "kernels", "aft-windows"]
    view = viewer.look(photo, "", kinds=("attention", "kernels", "aft-windows"), layer=0)
    assert list(view.figures) == ["aft-windows"]
    assert "No attention weights of the patch: " in view.text[1]
    assert "its AFTConv2d is attention-free" in view.text[1]
    assert "No positions around the patch: " in view.text[2]


def test_a_model_without_patches_shows_classes_alone(best, photo, tmp_path):
    ckpt = write_checkpoint_like(best, tmp_path / "cnn.ckpt", "test_resnet", {})
    view = Viewer(relvit.load(ckpt), 10_000).look(photo, "48 x 32", kinds=KINDS)
    assert view.text[0] == "The model sees 48 x 32 px, trained at 16 x 16 px."
    assert view.figures == {}
    assert len(view.classes) == 3
    assert all(line.endswith(": ResNet has no patches.") for line in view.text[1:])
    assert len(view.text) == 8


def test_native_shapes_are_called_by_their_name(best, photo, tmp_path):
    options = {"patch_size": 8, "embed_dim": 16, "depth": 1}
    ckpt = write_checkpoint_like(best, tmp_path / "a.ckpt", "test_relvit", options, native=True, patch_size=8)
    viewer = Viewer(relvit.load(ckpt), 10_000)
    text = "native shapes of up to 4 patches of 8 x 8 px"
    assert viewer.look(photo).text[0].startswith(f"The model sees 16 x 16 px, trained at {text}. ")
    assert viewer.sizes()[0] == (f"{text}, as in training", "")
    assert all(label.endswith("the shape of the image") for label, _ in viewer.sizes()[1:])


@pytest.fixture
def call(viewer):
    """Return the functions behind the events of a page."""
    return functions(build_page(viewer))


def test_the_page_shows_results_after_a_click(call, photo):
    event = gr.SelectData(None, {"index": [470, 10], "value": None})
    at, shape, text, framed, classes, missing, *figures = call["click"](
        event, (288, 480), photo, "24 x 40", ["attention", "aft-windows"], 1, "all"
    )
    assert missing.startswith("<p>No AFT biases around the patch: RelVisionTransformer has no attention-free layers")
    assert at == (10 / 288, 470 / 480)
    assert "row 0, column 4" in text
    assert shape == (framed.height, framed.width) == (288, 480)
    assert len(classes) == 3
    assert [kind for kind, figure in zip(LABELS, figures, strict=True) if figure.visible] == ["attention"]


def test_a_click_beside_the_image_is_at_its_edge(call, photo):
    far = gr.SelectData(None, {"index": [-5, 1e9], "value": None})
    assert call["click"](far, (288, 480), photo, "24 x 40", [], 1, "all")[0] == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("no.png", "", "this image cannot be read: it is not an image, or of an unknown format"),
        ("large.png", "", "this image cannot be read: it has 101 x 100 pixels, the most are 10,000"),
        ("photo.png", "<x>", "size &#x27;&lt;x&gt;&#x27;: give the longest side, such as 288"),
        ("photo.png", "-8", "give the longest side"),
        ("photo.png", "20 x 24", "20"),
        ("photo.png", "800 x 800", "800 x 800 px are 10,000 patches, and this page takes 4,096"),
    ],
)
def test_a_mistake_is_said_on_the_page_in_place_of_results(call, photo, tmp_path, name, size, message):
    (tmp_path / "no.png").write_bytes(b"<b>no</b>")
    Image.new("L", (101, 100)).save(tmp_path / "large.png")
    shape, text, *results = call["show"]((0.5, 0.5), str(tmp_path / name), size, list(KINDS), 0, "all")
    assert text.startswith("<p>Error: ")
    assert message in text
    assert "Traceback" not in text
    assert str(tmp_path) not in text
    assert [shape, *results[:3]] == [None, None, None, ""]
    assert not any(figure.visible for figure in results[3:])


def test_without_an_image_the_page_asks_for_one(call):
    _, text, *_ = call["show"]((0.5, 0.5), None, "", [], 0, "all")
    assert text == "<p>Drop an image, then click on a patch of it here.</p>"


def test_a_fault_of_the_page_is_in_the_terminal_alone(viewer, call, photo, capsys):
    viewer.look = None
    try:
        _, text, *_ = call["show"]((0.5, 0.5), photo, "", [], 0, "all")
    finally:
        del viewer.look
    assert "Error: the page failed; the terminal that it runs in says why" in text
    assert "TypeError" in capsys.readouterr().err


def test_the_page_loads_nothing_from_another_machine(viewer):
    with TestClient(build_app(viewer, 0.01), base_url="http://127.0.0.1:7860") as client:
        response = client.get("/")
        assert response.status_code == 200
        assert "relvit: test_relvit" in response.text
        assert not re.findall(r'<(?:link|script)[^>]*(?:src|href)="https?:[^>]*>', response.text)
        assert "default-src 'self'" in response.headers["content-security-policy"]


def test_a_file_beyond_the_limit_is_refused(viewer, tmp_path):
    with TestClient(build_app(viewer, 0.01), base_url="http://127.0.0.1:7860") as client:
        sent = client.post("/gradio_api/upload", files={"files": ("a.png", bytes(10_485))})
        assert sent.status_code == 200
        sent = client.post("/gradio_api/upload", files={"files": ("b.png", bytes(10_486))})
        assert sent.status_code == 413
    assert not list(tmp_path.glob("uploads/**/b.png"))


@pytest.mark.parametrize(
    ("host", "header", "status"),
    [
        ("127.0.0.1", "127.0.0.1:7860", 200),
        ("127.0.0.1", "localhost:7860", 200),
        ("127.0.0.1", "LOCALHOST", 200),
        ("127.0.0.1", "[::1]:7860", 200),
        # A website can let a name of its domain resolve to 127.0.0.1, so that its requests seem to come from this
        # machine.
        ("127.0.0.1", "rebound.example.org:7860", 403),
        ("127.0.0.1", "127.0.0.1.example.org", 403),
        ("127.0.0.1", "192.168.1.5:7860", 403),
        ("127.0.0.1", "[", 403),
        ("192.168.1.5", "192.168.1.5:7860", 200),
        ("lab.example.org", "lab.example.org", 200),
        # At 0.0.0.0 the page accepts every address of the machine, but no name of a website.
        ("0.0.0.0", "192.168.1.5:7860", 200),
        ("0.0.0.0", "rebound.example.org:7860", 403),
    ],
)
def test_hosts(viewer, host, header, status):
    with TestClient(build_app(viewer, 1, host), base_url="http://127.0.0.1:7860") as client:
        assert client.get("/", headers={"Host": header}).status_code == status
        for origin, allowed in ((f"http://{header}", status), ("http://evil.example.org", 403), ("null", 403)):
            assert client.get("/", headers={"Host": header, "Origin": origin}).status_code == allowed
