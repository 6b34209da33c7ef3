"""Hugging Face datasets from local files, offline: formats and labels; code that comes with a dataset does not run."""

import os
import socket
import sys

import pytest
from grey_folders import GREY, fits, make
from stored_images import data_of, grey_files, png, write_parquet

from relvit.app.data import UnreadableImageError, load_rgb
from relvit.app.data.archives.huggingface import HuggingFace

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(*args):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def place(tmp_path):
    """Write train and test, whose declared classes are not in alphabetic order; return arguments for the data."""
    names = ["cat", "ant", "bee"]
    for split, count in (("train", 4), ("test", 2)):
        files = [(name, content, names.index(label)) for name, content, label in grey_files(count)]
        write_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", files, datasets.ClassLabel(names=names))
    return {"name": f"hfds/{tmp_path}", "root": str(tmp_path / "cache")}


def test_declared_classes_keep_their_order(place, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path.parent)
    data = data_of(name=f"HFDS/{tmp_path.name}", root=place["root"], test_split="test")
    assert data.name == place["name"]  # `data` has made the path absolute.
    assert data.class_names == ["cat", "ant", "bee"]
    assert fits(data.dataset("test"), data.class_names) == [1, 1, 2, 2, 0, 0]
    # A part of a split may have no images of a declared class.
    data = data_of(**place, train_split="train[:6]", val_split="train[6:8]")
    assert fits(data.dataset("train"), data.class_names) == [1] * 4 + [2] * 2
    assert fits(data.dataset("val"), data.class_names) == [2, 2]
    assert str(data.dataset("val").samples[0][0]) == f"{place['name']}/train[6:8]/bee/002.png"


def test_parts_of_splits_that_overlap_are_warned_of(place, recwarn):
    data_of(**place, train_split="train[2:]", val_split="train[:2]", test_split="test").setup("fit")
    assert not recwarn.list
    recwarn.clear()
    names = r"'ant/002.png', 'ant/003.png', 'bee/000.png #2' and 1 more"
    with pytest.warns(UserWarning, match=f"^4 images of val are also images of train: {names}; the accuracy on them"):
        data_of(**place, train_split="test+train[2:]", val_split="train[:50%]").setup("fit")
    with pytest.warns(
        UserWarning, match="^1 image of test is also an image of train: 'bee/001.png'; the accuracy on it"
    ):
        data_of(**place, val_split="test[:2]", test_split="test[:3]+train[5:6]").setup("fit")
    # Both parts name all splits, so no split counts as unused.
    assert not recwarn.list


def test_declared_but_unknown_labels(tmp_path):
    kind = datasets.ClassLabel(names=["a", "b"])
    write_parquet(tmp_path / "train.parquet", [("1.png", png(1), 0), ("2.png", png(1), 1), ("3.png", png(1), -1)], kind)
    place = {"name": f"hfds/{tmp_path}", "root": str(tmp_path / "cache"), "val_split": "train"}
    with pytest.warns(UserWarning, match="the split 'train' of .* has no label for 1 of 3 images, such as"):
        assert data_of(**place).dataset("train").targets == [0, 1]


def test_saved_to_disk(tmp_path):
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.Value("string")})
    files = grey_files(3)
    table = {"picture": [{"path": None, "bytes": content} for _, content, _ in files], "kind": [f[2] for f in files]}
    everything = datasets.Dataset.from_dict(table, features=features)
    keys = {"input_key": "picture", "target_key": "kind"}
    everything.with_format("torch").save_to_disk(tmp_path / "one")
    data = data_of(name=f"hfds/{tmp_path}/one", val_split="train", **keys)
    assert (data.class_names, fits(data.dataset("train"))) == (list(GREY), [0] * 3 + [1] * 3 + [2] * 3)
    assert str(data.dataset("train").samples[4][0]) == f"hfds/{tmp_path}/one/train/row 4"
    split = everything.train_test_split(3, seed=0)
    split.save_to_disk(tmp_path / "two")
    data = data_of(name=f"hfds/{tmp_path}/two", test_split="test", **keys)
    assert sorted(fits(data.dataset("train")) + fits(data.dataset("val")) + fits(data.dataset("test"))) == (
        [0] * 3 + [1] * 3 + [2] * 3
    )
    assert len(data.dataset("test")) == 3
    for name, known in (("one", "'train'"), ("two", "'test', 'train'")):
        with pytest.raises(
            ValueError, match=rf"no split 'trian' in hfds/.*\(did you mean 'train'\?\); it holds {known}"
        ):
            data_of(name=f"hfds/{tmp_path}/{name}", train_split="trian", **keys)


def test_a_folder_of_images(tmp_path):
    """Rows name files; the images that are held out do not depend on the place of the folder."""
    held_out = []
    for folder in ("a", "b"):
        make(tmp_path / folder, train=4, test=1)
        data = data_of(name=f"hfds/{tmp_path}/{folder}", root=str(tmp_path / "cache"), test_split="test")
        assert fits(data.dataset("train")) == [0] * 3 + [1] * 3 + [2] * 3
        assert fits(data.dataset("test")) == [0, 1, 2]
        held_out.append(data.held_out())
    assert held_out[0] == held_out[1]
    assert {name for name, _ in held_out[0]} <= {f"train/{name}/00{i}.png" for name in GREY for i in range(4)}
    (tmp_path / "b" / "test" / "ant" / "000.png").unlink()
    with pytest.raises(UnreadableImageError, match=r"hfds/.*/test/test/ant/000.png: there is no such file"):
        list(data.dataset("test"))


def test_names_of_rows(tmp_path):
    """An image has the name of its file, with a count if the name comes twice, or else the number of its row."""
    names = ["x/a.png", None, "a.png", "/far/away/a.png", "a.png"]
    write_parquet(tmp_path / "train.parquet", [(name, png(1), "a") for name in names])
    reader = HuggingFace(str(tmp_path), str(tmp_path / "cache"))
    found = reader.find("train", labelled=False).images
    assert [reader.key(image) for image in found] == ["x/a.png", "row 1", "a.png", "a.png #2", "a.png #3"]


def test_encoded_bytes_without_the_feature(tmp_path):
    """Other libraries write Parquet files without the feature Image."""
    files = grey_files(2)
    labels = [label for _, _, label in files]
    images = {"plain": [content for _, content, _ in files], "both": [{"bytes": f[1], "path": f[0]} for f in files]}
    for key, values in images.items():
        (tmp_path / key).mkdir()
        parquet.write_table(pa.table({"image": values, "label": labels}), tmp_path / key / "train.parquet")
        data = data_of(name=f"hfds/{tmp_path}/{key}", root=str(tmp_path / "cache"), val_split="train")
        assert fits(data.dataset("train")) == [0, 0, 1, 1, 2, 2]


def test_links_and_devices_in_rows_are_not_opened(tmp_path):
    paths = ["https://host/a.png", "/dev/zero", "nowhere.png", "zip://a.png::/x.zip"]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    images = [{"bytes": None, "path": path} for path in [*paths, None]]
    # `datasets` itself would try to open the files, so write the table by pyarrow.
    table = pa.Table.from_pydict({"image": images, "label": ["a"] * 5}, schema=features.arrow_schema)
    parquet.write_table(table, tmp_path / "train.parquet")
    found = HuggingFace(str(tmp_path), str(tmp_path / "cache")).find("train", labelled=False).images
    reasons = []
    for image in found:
        with pytest.raises(UnreadableImageError) as caught:
            load_rgb(image)
        reasons.append(caught.value.reason)
    assert reasons[:4] == ["there is no such file"] * 4
    assert "the row holds no image" in reasons[4]


def test_code_that_comes_along_does_not_run(tmp_path):
    ran = tmp_path / "ran"
    folder = tmp_path / "evil"
    write_parquet(folder / "train.parquet", grey_files(2))
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(ran)!r})\n")
    cache = str(tmp_path / "cache")
    for name in (folder, folder / "evil.py", folder / "evil"):
        try:
            data_of(name=f"hfds/{name}", root=cache)
        except ValueError as error:
            assert "cannot load the split 'train' of hfds/" in str(error)  # noqa: PT017
    assert not ran.exists()


MISTAKES = [
    ({"train_split": "trian"}, "cannot load the split 'trian' of hfds/.*: Unknown split"),
    (
        {"input_key": "imag"},
        r"no column 'imag' in hfds/.* \(did you mean 'image'\?\); its columns are 'image', 'label'",
    ),
    ({"target_key": "labels"}, r"no column 'labels' in .* \(did you mean 'label'\?\).*\(--data.target_key\)"),
    ({"input_key": "label"}, "column 'label' of hfds/.* holds no images but ClassLabel.*; columns of images are 'im"),
    ({"target_key": "image"}, "holds no classes, its type is Image: labels are .*, the columns are 'image', 'label'"),
]


def test_mistakes(place, tmp_path):
    for arguments, message in MISTAKES:
        with pytest.raises(ValueError, match=message):
            data_of(**place, **arguments)
    message = "'label' of hfds/.* holds no classes, its type is {}: .{{3,60}} is not a label: .*; labels are "
    for folder, value, kind in (("float", 0.5, "float32"), ("bytes", b"x" * 999, "binary")):
        write_parquet(tmp_path / folder / "train.parquet", [("1.png", png(1), value)], datasets.Value(kind))
        with pytest.raises(ValueError, match=message.format(kind)):
            data_of(name=f"hfds/{tmp_path}/{folder}", root=str(tmp_path / "cache"))


def test_not_installed_or_too_old(monkeypatch, place):
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(ModuleNotFoundError, match=r"datasets 3.6.0 is too old, 4.0 or newer .* \"relvit\[hfds\]\""):
        data_of(**place)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r'needs the package datasets: pip install "relvit\[hfds\]"'):
        data_of(**place)
    assert os.path.isdir(place["name"].removeprefix("hfds/"))
