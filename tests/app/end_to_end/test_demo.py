"""`relvit demo` in a real browser, offline: load the page, upload, read the results, change the size, click a patch."""

import io
import json
import re
import shutil
import signal
import time
import urllib.request

import numpy as np
import pytest
from PIL import Image
from processes import finish, start

import relvit
from relvit.app.evaluation.pictures import draw
from relvit.app.plots import picture_of

pytest.importorskip("gradio")
webdriver = pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = pytest.mark.slow

OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server"]
OPTIONS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
OPTIONS += ["--disable-dev-shm-usage", "--window-size=1200,900"]
SECONDS = 120


@pytest.fixture
def browser(tmp_path, monkeypatch):
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*OPTIONS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    # Leave the page for new tabs, whose requests must not be in the log.
    browser.get("about:blank")
    browser.get_log("performance")
    yield browser
    browser.quit()


@pytest.fixture
def page(run, tmp_path):
    """The address of the page; only the port differs from the command's defaults."""
    (tmp_path / "files").mkdir()
    ckpt = run / "checkpoints" / "best.ckpt"
    process = start(["demo", ckpt, "--port", "0"], tmp_path, env={"TMPDIR": str(tmp_path / "files")})
    yield re.search(r"http://\S+:\d+", process.stdout.readline())[0]
    assert list((tmp_path / "files").glob("relvit-demo-*/**/*.png"))
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out) == (0, ""), err
    assert "Traceback" not in err
    assert list((tmp_path / "files").glob("relvit-demo-*")) == []


def wait_for(browser, *words):
    """Wait until the page's text contains all of these words, and return the text."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        text = browser.find_element(By.TAG_NAME, "body").text
        if all(word in text for word in words):
            return text
        time.sleep(0.2)
    raise AssertionError(f"{words} not in {text}")


def upload(browser, path):
    # The page shows its text before it has this element, and on a busy machine the element may come much later.
    end = time.monotonic() + SECONDS
    while not (found := browser.find_elements(By.CSS_SELECTOR, "input[type=file]")) and time.monotonic() < end:
        time.sleep(0.2)
    found[0].send_keys(str(path))


def classes(browser):
    """Return names and percentages, as the page shows them."""
    return re.findall(r"^(cat|dog|owl)\n(\d+)%$", browser.find_element(By.ID, "classes").text, re.MULTILINE)


def expected(clf, path):
    found = clf.predict(path)
    return [(name, f"{p:.0%}".rstrip("%")) for name, p in zip(found.names, found.probabilities, strict=True)]


def test_a_visit(browser, page, run, photos, tmp_path):
    photo, best = str(photos / "test" / "owl" / "0.jpg"), run / "checkpoints" / "best.ckpt"
    browser.get(page)
    wait_for(browser, "test_relvit", "Drop an image, then click")
    upload(browser, photo)
    wait_for(browser, "The model sees 16 x 16 px", "2 x 2 patches; now row 1, column 1, from 0.")
    first = classes(browser)
    assert first == expected(relvit.load(best), photo)

    size = browser.find_element(By.CSS_SELECTOR, "input[aria-label=Size]")
    size.send_keys(Keys.CONTROL, "a")
    size.send_keys("24 x 40", Keys.ENTER)
    wait_for(browser, "The model sees 24 x 40 px", "3 x 5 patches; now row 1, column 2, from 0.")
    clf = relvit.load(best, (24, 40))
    assert classes(browser) == expected(clf, photo)

    seen = browser.find_element(By.CSS_SELECTOR, "#seen img")
    # The click is in CSS pixels from the middle of the image, in the last row and the first column of patches.
    right, down = -seen.size["width"] * 0.45, seen.size["height"] * 0.4
    webdriver.ActionChains(browser).move_to_element_with_offset(seen, right, down).click().perform()
    wait_for(browser, "now row 2, column 0, from 0.")
    image = clf.transform(Image.open(photo).convert("RGB"))
    options = {"patch": (2, 0), "layer": 1, "class_names": clf.class_names}
    for kind in ("attention", "kernels"):
        figure = draw(kind, clf.model, image, picture_of(image, clf.mean, clf.std, 480), **options)
        figure.canvas.draw()
        address = browser.find_element(By.CSS_SELECTOR, f"#{kind} img").get_attribute("src")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        drawn = np.asarray(Image.open(io.BytesIO(opener.open(address).read())).convert("RGB"))
        np.testing.assert_array_equal(drawn, np.asarray(figure.canvas.buffer_rgba())[..., :3])

    for name, content, message in (
        ("large.png", bytes(20 * 2**20 + 1), "exceed the maximum allowed size of 20"),
        ("bomb.png", None, "Error: this image cannot be read: it has 8000 x 7000 pixels, the most are 50,000,000"),
        ("no.png", b"no image", "Error: this image cannot be read: it is not an image"),
    ):
        browser.get(page)
        wait_for(browser, "Drop an image, then click")
        if content is None:
            Image.new("1", (8000, 7000)).save(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content)
        upload(browser, tmp_path / name)
        wait_for(browser, message)
        assert classes(browser) == []

    browser.set_window_size(390, 844)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")

    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert len(asked) > 20
    assert [url for url in asked if not url.startswith((page, "data:", "blob:"))] == []
    problems = [entry["message"] for entry in browser.get_log("browser")]
    assert not [message for message in problems if "Content Security Policy" in message]
