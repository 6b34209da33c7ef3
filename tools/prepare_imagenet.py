"""Unpack ImageNet-1k's archives, count the images of each class: `python tools/prepare_imagenet.py ARCHIVES ROOT`.

ARCHIVES is the folder with ILSVRC2012_img_train.tar (138 GB), ILSVRC2012_img_val.tar (6.3 GB) and
ILSVRC2012_devkit_t12.tar.gz (2.5 MB), from https://image-net.org, which needs a registration. The result is

    ROOT/train/<wnid>/*.JPEG    ROOT/val/<wnid>/*.JPEG    ROOT/ILSVRC2012_devkit_t12/data/

for `relvit.app.data.ImageNetData`, another 145 GB. The command may be stopped at any time and started again: it
continues where it stopped, and no unfinished file ever has its final name. `--md5` first compares the archives with the
published sums (some minutes). At the end the tool counts the images of each class; the exit status is 1 where the
numbers are not the official ones (with `--subset` any number is right).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import rich.progress
from rich.console import Console
from scipy.io import loadmat
from torchvision.datasets.imagenet import ARCHIVE_META

TRAIN, DEVKIT, VAL = (ARCHIVE_META[part][0] for part in ("train", "devkit", "val"))
MD5 = dict(ARCHIVE_META.values())

DEVKIT_DATA = "ILSVRC2012_devkit_t12/data"
META, GROUND_TRUTH = "meta.mat", "ILSVRC2012_validation_ground_truth.txt"

CLASSES, TRAIN_IMAGES, VAL_IMAGES_OF_A_CLASS = 1000, 1_281_167, 50


class ArchiveError(ValueError):
    """A damaged archive, or one with unexpected members."""


def prepare(archives: Path, root: Path, check_md5: bool = False, subset: bool = False) -> list[str]:
    """Unpack what is missing below root; return how numbers of images differ from the official numbers, a line each.

    Raises:
        FileNotFoundError: An archive is missing.
        ArchiveError: An archive is damaged or has unexpected members.
    """
    files = {name: archives / name for name in (DEVKIT, VAL, TRAIN)}
    if absent := [name for name, file in files.items() if not file.is_file()]:
        raise FileNotFoundError(f"no {', '.join(absent)} in {archives}; get them from https://image-net.org")
    if check_md5:
        for name, file in files.items():
            compare_md5(file, MD5[name])
    root.mkdir(parents=True, exist_ok=True)
    unpack_devkit(files[DEVKIT], root / DEVKIT_DATA)
    val_classes = read_val_classes(root / DEVKIT_DATA)
    if not (root / "val").is_dir():
        unpack_val(files[VAL], root / "val", val_classes)
    unpack_train(files[TRAIN], root / "train")
    return [] if subset else complaints(root)


def compare_md5(file: Path, expected: str) -> None:
    """Raise an ArchiveError unless the file has the expected MD5 sum."""
    with reading(file, "md5 of") as stream:
        found = hashlib.file_digest(stream, "md5").hexdigest()
    if found != expected:
        raise ArchiveError(f"{file} has the MD5 sum {found}, not {expected}: download it again")


def unpack_devkit(archive: Path, folder: Path) -> None:
    """Unpack the two files with the names of the classes and the classes of the validation images."""
    if (folder / META).is_file() and (folder / GROUND_TRUTH).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{DEVKIT_DATA}/{name}": folder / name for name in (META, GROUND_TRUTH)}
    with opened(archive) as tar:
        for member in tar:
            if member.name.removeprefix("./") in wanted:
                write_member(tar, member, wanted[member.name.removeprefix("./")], archive)
    if absent := [name for name, file in wanted.items() if not file.is_file()]:
        raise ArchiveError(f"{archive} holds no {', '.join(absent)}")


def read_val_classes(folder: Path) -> list[str]:
    """Read the WordNet id of each validation image; the devkit's numbers are not positions of sorted ids."""
    synsets = loadmat(folder / META, squeeze_me=True)["synsets"]
    wnids = {int(number): str(wnid) for number, wnid in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)}
    return [wnids[int(line)] for line in (folder / GROUND_TRUTH).read_text().split()]


def unpack_val(archive: Path, folder: Path, classes: list[str]) -> None:
    """Unpack each image into the folder of its class; `folder` appears when all are there."""
    unfinished = folder.with_name(f".{folder.name}.part")
    count = 0
    with opened(archive) as tar:
        for member in tar:
            name = checked_name(member, r"ILSVRC2012_val_(\d{8})\.JPEG", archive)
            number = int(name[15:23])
            if not 1 <= number <= len(classes):
                raise ArchiveError(f"{archive} holds {name}; the devkit has the classes of {len(classes)} images")
            write_member(tar, member, unfinished / classes[number - 1] / name, archive)
            count += 1
    if count != len(classes):
        raise ArchiveError(f"{archive} holds {count} images; the devkit has the classes of {len(classes)}")
    unfinished.rename(folder)


def unpack_train(archive: Path, folder: Path) -> None:
    """Unpack the archive of each class into a folder, which appears when all images of the class are there."""
    folder.mkdir(exist_ok=True)
    with opened(archive) as outer:
        for entry in outer:
            wnid = checked_name(entry, r"n\d{8}\.tar", archive).removesuffix(".tar")
            if (folder / wnid).is_dir():
                continue
            inside = Path(f"{archive}:{entry.name}")
            unfinished = folder / f".{wnid}.part"
            unfinished.mkdir(exist_ok=True)
            with opened(inside, outer.extractfile(entry)) as inner:
                for member in inner:
                    name = checked_name(member, rf"{wnid}_\d+\.JPEG", inside)
                    write_member(inner, member, unfinished / name, inside)
            unfinished.rename(folder / wnid)


def reading(file: Path, what: str) -> BinaryIO:
    """Open a file; a bar shows how much of it has been read."""
    return rich.progress.open(file, "rb", description=f"{what} {file.name}", console=Console(stderr=True))


@contextmanager
def opened(archive: Path, stream: BinaryIO | None = None) -> Iterator[tarfile.TarFile]:
    """Open an archive, on disk or as a stream; errors name it."""
    try:
        with stream or reading(archive, "unpacking") as file, tarfile.open(fileobj=file) as tar:
            yield tar
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # The disk may be full, for example.
            raise
        raise ArchiveError(f"{archive} is damaged or incomplete ({error}): download it again") from error


def checked_name(member: tarfile.TarInfo, pattern: str, archive: Path) -> str:
    """Return the name of a member; refuse links, folders, devices and names unlike those of the official archives."""
    name = member.name.removeprefix("./")
    if not member.isreg() or not re.fullmatch(pattern, name):
        kind = "" if member.isreg() else " (no plain file)"
        raise ArchiveError(f"{archive} holds {member.name!r}{kind}, which the official archive does not: refused")
    return name


def write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, archive: Path) -> None:
    """Write a member under a temporary name, then rename it; skip a member that exists."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.part")
    with tar.extractfile(member) as source, open(temporary, "wb") as file:
        shutil.copyfileobj(source, file)
    if temporary.stat().st_size != member.size:
        raise ArchiveError(f"{archive} ends inside {member.name}: download it again")
    os.replace(temporary, target)


def complaints(root: Path) -> list[str]:
    """List where the numbers of classes and images differ from the official numbers, a text for each difference."""
    train, val = (
        {folder.name: len(os.listdir(folder)) for folder in sorted((root / split).iterdir()) if folder.is_dir()}
        for split in ("train", "val")
    )
    checks = [("train", "classes", len(train), CLASSES), ("val", "classes", len(val), CLASSES)]
    checks.append(("train", "images", sum(train.values()), TRAIN_IMAGES))
    checks += [(f"val/{wnid}", "images", count, VAL_IMAGES_OF_A_CLASS) for wnid, count in val.items()]
    found = [f"{part} has {n:,} {what} instead of {right:,}" for part, what, n, right in checks if n != right]
    if differ := sorted(train.keys() ^ val.keys()):
        found.append(f"only in train or only in val: {', '.join(differ[:10])}")
    return found


def main() -> int:
    """Unpack, and print what differs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path, help="folder of the official archives")
    parser.add_argument("root", type=Path, help="folder for train and val")
    parser.add_argument("--md5", action="store_true", help="compare the archives with the published sums first")
    parser.add_argument("--subset", action="store_true", help="the archives hold other numbers than the official ones")
    options = parser.parse_args()
    try:
        wrong = prepare(options.archives, options.root, options.md5, options.subset)
    except KeyboardInterrupt:
        print("interrupted; the same command continues where this one stopped", file=sys.stderr)
        return 130
    except (ArchiveError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in wrong:
        print(line)
    print(f"{options.root} is ready" if not wrong else f"{options.root} is not what ImageNet-1k should be")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
