"""Small archives like ImageNet's: unpacked, interrupted, damaged or hostile; ImageNetData reads the result."""

import io
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from scripts import load

from relvit.app.data import ImageNetData

tool = load("prepare_imagenet")

# The devkit numbers the classes in another order than their names; two classes have the same first name.
SYNSETS = {1: ("n02012849", "crane"), 2: ("n01440764", "tench, Tinca tinca"), 3: ("n03126707", "crane")}
WNIDS = sorted(wnid for wnid, _ in SYNSETS.values())
GREY = dict(zip(WNIDS, (10, 100, 200), strict=True))
# These are the classes of the validation images, by the devkit's numbers.
GROUND_TRUTH = [2, 3, 1, 1, 2, 3]


def jpeg(grey):
    stream = io.BytesIO()
    Image.new("L", (12, 8), grey).save(stream, "jpeg", quality=95)
    return stream.getvalue()


def add(tar, name, content=b"", **kind):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in kind.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(content))


def inner_tar(wnid, count, extra):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for number in range(count):
            add(tar, f"{wnid}_{number * 7}.JPEG", jpeg(GREY[wnid]))
        for name, kind in extra:
            add(tar, name, **kind)
    return stream.getvalue()


def make_archives(folder, count=4, train_extra=(), inner_extra=(), val_extra=()):
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / tool.TRAIN, "w") as tar:
        for wnid, _ in SYNSETS.values():
            add(tar, f"{wnid}.tar", inner_tar(wnid, count, inner_extra if wnid == WNIDS[1] else ()))
        for name, kind in train_extra:
            add(tar, name, **kind)
    with tarfile.open(folder / tool.VAL, "w") as tar:
        for number, synset in enumerate(GROUND_TRUTH, start=1):
            add(tar, f"ILSVRC2012_val_{number:08d}.JPEG", jpeg(GREY[SYNSETS[synset][0]]))
        for name, kind in val_extra:
            add(tar, name, **kind)
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")]
    synsets = np.array([(float(i), wnid, words) for i, (wnid, words) in SYNSETS.items()], fields)
    savemat(folder / "meta.mat", {"synsets": synsets[:, None]})
    with tarfile.open(folder / tool.DEVKIT, "w:gz") as tar:
        add(tar, f"{tool.DEVKIT_DATA}/{tool.META}", (folder / "meta.mat").read_bytes())
        add(tar, f"{tool.DEVKIT_DATA}/{tool.GROUND_TRUTH}", "".join(f"{n}\n" for n in GROUND_TRUTH).encode())
        add(tar, "ILSVRC2012_devkit_t12/readme.txt", b"not needed")
    return folder


@pytest.fixture
def archives(tmp_path):
    return make_archives(tmp_path / "archives")


def listing(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def expected(count=4):
    files = [f"train/{wnid}/{wnid}_{number * 7}.JPEG" for wnid in WNIDS for number in range(count)]
    files += [
        f"val/{SYNSETS[synset][0]}/ILSVRC2012_val_{number:08d}.JPEG"
        for number, synset in enumerate(GROUND_TRUTH, start=1)
    ]
    return sorted([*files, f"{tool.DEVKIT_DATA}/{tool.META}", f"{tool.DEVKIT_DATA}/{tool.GROUND_TRUTH}"])


def all_can_be_read(root, files):
    for file in files:
        if file.endswith("JPEG"):
            Image.open(root / file).load()


def test_folders_by_class_and_the_data_of_them(archives, tmp_path, monkeypatch):
    root = tmp_path / "imagenet"
    assert tool.prepare(archives, root, subset=True) == []
    assert listing(root) == expected()
    data = ImageNetData(str(root), img_size=8, num_workers=0, augment="none", mean=(0.0,) * 3, std=(1.0,) * 3)
    assert data.wnids == WNIDS
    assert data.class_names == ["tench", "crane (n02012849)", "crane (n03126707)"]
    assert (len(data.dataset("train")), len(data.dataset("val")), data.held_out()) == (12, 6, [])
    for split in ("train", "val"):
        for image, label in data.dataset(split):
            assert float(image.mean() * 255) == pytest.approx(GREY[WNIDS[label]], abs=1.5)
    args = json.loads(json.dumps(data.init_args()))
    assert (args["wnids"], args["class_names"]) == (WNIDS, data.class_names)
    assert ImageNetData(**args).init_args() == data.init_args()
    # A second run unpacks nothing again.
    monkeypatch.setattr(tool, "write_member", lambda *_: pytest.fail("written again"))
    tool.prepare(archives, root, subset=True)


@pytest.mark.parametrize("stop", [1, 7, 13])
def test_interrupted_anywhere_it_goes_on_and_has_no_half_file_under_a_final_name(archives, tmp_path, monkeypatch, stop):
    """Copy number `stop` (2 of the devkit, 6 of val, 12 of train) writes half a file and is then interrupted."""
    root, copies = tmp_path / "imagenet", []
    copy = tool.shutil.copyfileobj

    def killed(source, file):
        copies.append(file.name)
        if len(copies) == stop:
            file.write(source.read(100))
            raise KeyboardInterrupt
        copy(source, file)

    monkeypatch.setattr(tool.shutil, "copyfileobj", killed)
    with pytest.raises(KeyboardInterrupt):
        tool.prepare(archives, root, subset=True)
    all_can_be_read(root, set(listing(root)) & set(expected()))
    # The folder of a class appears when all its images are there.
    for folder in (root / "train").glob("n*"):
        assert len(list(folder.iterdir())) == 4
    assert (root / "val").exists() == (stop > 8)
    done = len(copies) - 1
    tool.prepare(archives, root, subset=True)
    assert listing(root) == expected()
    # Complete files are not copied again.
    assert len(copies) == stop + 20 - done
    all_can_be_read(root, expected())


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
HOSTILE = [
    ("../../outside.JPEG", {}),
    ("/tmp/absolute.JPEG", {}),
    ("n01440764_1.JPEG", LINK),
    ("ILSVRC2012_val_00000001.JPEG", LINK),
    ("n01440764.tar", {"type": tarfile.LNKTYPE, "linkname": "n02012849.tar"}),
    ("n02012849/n02012849_1.JPEG", {}),
    ("n02012849", {"type": tarfile.DIRTYPE}),
    ("n02012849_1.JPEG.sh", {}),
    ("n02012849_99.JPEG", {"type": tarfile.CHRTYPE}),
]


@pytest.mark.parametrize("place", ["train_extra", "inner_extra", "val_extra"])
def test_hostile_members_are_refused(tmp_path, place):
    for number, member in enumerate(HOSTILE):
        archives = make_archives(tmp_path / str(number), 1, **{place: [member]})
        with pytest.raises(tool.ArchiveError, match=r"which the official archive does not: refused") as caught:
            tool.prepare(archives, tmp_path / "x" / "y" / str(number), subset=True)
        assert repr(member[0]) in str(caught.value)
    outside = [*tmp_path.rglob("*outside*"), Path("/tmp/absolute.JPEG")]
    assert not any(path.exists() for path in outside)
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_damaged_archives_are_named(archives, tmp_path):
    content = (archives / tool.TRAIN).read_bytes()
    (archives / tool.TRAIN).write_bytes(content[: len(content) // 2 + 300])
    with pytest.raises(tool.ArchiveError, match=r"ILSVRC2012_img_train\.tar.*(damaged or incomplete|ends inside)"):
        tool.prepare(archives, tmp_path / "a", subset=True)
    (archives / tool.TRAIN).write_bytes(content)
    with tarfile.open(archives / tool.VAL, "w") as tar:
        add(tar, "ILSVRC2012_val_00000001.JPEG", jpeg(10))
    with pytest.raises(tool.ArchiveError, match="holds 1 images; the devkit has the classes of 6"):
        tool.prepare(archives, tmp_path / "b", subset=True)
    assert not (tmp_path / "b" / "val").exists()
    with tarfile.open(archives / tool.VAL, "a") as tar:
        add(tar, "ILSVRC2012_val_00000007.JPEG", jpeg(10))
    with pytest.raises(tool.ArchiveError, match=r"holds ILSVRC2012_val_00000007\.JPEG; the devkit has"):
        tool.prepare(archives, tmp_path / "c", subset=True)
    (archives / tool.VAL).unlink()
    with pytest.raises(FileNotFoundError, match=r"no ILSVRC2012_img_val\.tar in"):
        tool.prepare(archives, tmp_path / "d", subset=True)


def test_md5(archives, tmp_path, monkeypatch):
    # These are the sums that https://image-net.org publishes.
    assert tool.MD5[tool.TRAIN] == "1d675b47d978889d74fa0da5fadfb00e"
    assert tool.MD5[tool.VAL] == "29b22e2961454d5413ddabcf34fc5622"
    with pytest.raises(tool.ArchiveError, match=r"has the MD5 sum [0-9a-f]{32}, not fa75699e90414af021442c21a62c3abf"):
        tool.prepare(archives, tmp_path / "a", check_md5=True, subset=True)
    sums = {name: tool.hashlib.md5((archives / name).read_bytes()).hexdigest() for name in tool.MD5}
    monkeypatch.setattr(tool, "MD5", sums)
    assert tool.prepare(archives, tmp_path / "a", check_md5=True, subset=True) == []


def test_counts_are_compared_with_the_official_ones(archives, tmp_path, monkeypatch, capsys):
    root = tmp_path / "imagenet"
    assert tool.prepare(archives, root) == [
        "train has 3 classes instead of 1,000",
        "val has 3 classes instead of 1,000",
        "train has 12 images instead of 1,281,167",
        *(f"val/{wnid} has 2 images instead of 50" for wnid in WNIDS),
    ]
    monkeypatch.setattr(sys, "argv", ["prepare_imagenet.py", str(archives), str(root)])
    assert tool.main() == 1
    assert "is not what ImageNet-1k should be" in capsys.readouterr().out
    monkeypatch.setattr(tool, "CLASSES", 3)
    monkeypatch.setattr(tool, "TRAIN_IMAGES", 12)
    monkeypatch.setattr(tool, "VAL_IMAGES_OF_A_CLASS", 2)
    assert tool.main() == 0
    os.rename(root / "val" / WNIDS[0], root / "val" / "n99999999")
    assert tool.complaints(root) == [f"only in train or only in val: {WNIDS[0]}, n99999999"]
    monkeypatch.setattr(sys, "argv", ["prepare_imagenet.py", str(tmp_path / "none"), str(root)])
    assert tool.main() == 2
