"""Tar archives: which files are found in them, hostile archives, and every kind of damage."""

import gzip
import io
import os
import pickle
import shutil
import tarfile

import pytest
from grey_folders import GREY, fits
from stored_images import data_of, grey_files, png, write_tar
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from relvit.app.data import UnreadableImageError, load_rgb
from relvit.app.data.archives.tar import images_in, members

# This is the header of a sparse file, which is not stored in one piece.
SPARSE = {"major": "0", "minor": "1", "map": "0,4", "size": "9"}
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def in_folder(folder, count):
    return [(f"{folder}/{name}", content) for name, content, _ in grey_files(count)]


@pytest.mark.parametrize("kind", FORMATS)
def test_contents_of_every_format(kind, tmp_path):
    """Contents and order are the same as tarfile's, also for long names, names beyond ASCII, and empty files."""
    names = ["a.png", "d/" + "long/" * 30 + "b.png", "d/ü.png", "empty", "x" * 90 + ".png"]
    contents = [bytes([i]) * length for i, length in enumerate((1, 511, 512, 0, 5000))]
    file = write_tar(tmp_path / "a.tar", list(zip(names, contents, strict=True)), format=FORMATS[kind])
    found = members(str(file))
    assert [(member.name, member.read()) for member in found] == list(zip(names, contents, strict=True))
    with tarfile.open(file) as archive:
        assert [archive.extractfile(name).read() for name in names] == contents


def test_names_that_are_no_text(tmp_path):
    """Names with different bytes that are not UTF-8 stay different, and can be printed."""
    raw = [tarfile.TarInfo(f"{letter}.png").tobuf(tarfile.USTAR_FORMAT) for letter in "ab"]
    headers = []
    for header, byte in zip(raw, b"\xe9\xe8", strict=True):
        header = bytes([byte]) + header[1:]
        check = sum(header[:148]) + 8 * 32 + sum(header[156:])
        headers.append(header[:148] + b"%06o\0 " % check + header[156:])
    (tmp_path / "a.tar").write_bytes(b"".join(headers) + bytes(1024))
    assert [member.name for member in members(str(tmp_path / "a.tar"))] == [r"\xe9.png", r"\xe8.png"]


def test_labels_are_those_of_timm(tmp_path):
    files = [*in_folder("photos/./train", 2), ("./photos/train/cat/deep/owl/x.png", png(3)), ("photos/note.txt", b"")]
    file = write_tar(tmp_path / "photos.tar", files)
    data = data_of(name=str(file), class_names=["ant", "bee", "cat", "owl"], val_split="train")
    timm = ReaderImageInTar(str(file), cache_tarinfo=False)
    assert {str(image).rsplit("/", 1)[-1][0] for image, _ in data.dataset("train").samples} == {"0", "x"}
    reference = sorted(zip((info.size for info in timm.samples[:, 0]), timm.targets, strict=True))
    assert sorted((image.size, label) for image, label in data.dataset("train").samples) == reference
    assert list(timm.class_name_to_idx) == data.class_names


def test_images_of_train_in_val_are_warned_of(tmp_path):
    file = write_tar(tmp_path / "photos.tar", [*in_folder("train", 2), *in_folder("val", 2)])
    data_of(name=str(file), val_split="val").setup("fit")
    with pytest.warns(UserWarning, match="^6 images of val are also images of train: "):
        data_of(name=str(file), val_split="train").setup("fit")


def test_archives_in_an_archive(tmp_path):
    """ImageNet's official training images are an archive of archives."""
    inner = []
    for name, value in GREY.items():
        write_tar(tmp_path / "inner" / f"{name}.tar", [(f"{name}_{i}.JPEG", png(value)) for i in range(3)])
        inner.append((f"{name}.tar", (tmp_path / "inner" / f"{name}.tar").read_bytes()))
    file = write_tar(tmp_path / "outer.tar", inner)
    data = data_of(name=str(file), val_split="train")
    assert fits(data.dataset("train")) == [0] * 3 + [1] * 3 + [2] * 3
    assert str(data.dataset("train").samples[0][0]) == f"{file}/ant.tar/ant_0.JPEG"
    assert [*data_of(root=str(file), val_split="train").dataset("train").samples] == [*data.dataset("train").samples]
    # If the archives are files in a folder, each archive is a class, too.
    data = data_of(name="inner", root=str(tmp_path), val_split="train")
    assert fits(data.dataset("train")) == [0] * 3 + [1] * 3 + [2] * 3
    write_tar(tmp_path / "broken.tar", [("ant.tar", inner[0][1][:700])])
    with pytest.raises(ValueError, match=r"broken.tar: .*in ant.tar: "):
        data_of(name=str(tmp_path / "broken.tar"))


def test_splits_are_folders_or_archives(tmp_path):
    both = [*in_folder("all/train", 3), *in_folder("all/val", 2)]
    one = data_of(name=str(write_tar(tmp_path / "one.tar", both)), val_split="val")
    write_tar(tmp_path / "two" / "train.tar", in_folder("x", 3))
    (tmp_path / "two" / "val.tar").mkdir()
    for name, value in GREY.items():
        write_tar(tmp_path / "two" / "val.tar" / f"{name}.tar", [(f"{i}.png", png(value)) for i in range(2)])
    two = data_of(name=str(tmp_path / "two"), val_split="val.tar")
    for data in (one, two):
        assert fits(data.dataset("train")) == [0] * 3 + [1] * 3 + [2] * 3
        assert fits(data.dataset("val")) == [0, 0, 1, 1, 2, 2]
    # `predict` needs only one archive, so the broken one is not opened.
    (tmp_path / "two" / "train.tar").write_bytes(b"broken")
    assert len(data_of(**two.init_args()).dataset("val")) == 6
    with pytest.raises(ValueError, match=r"has no split 'vall', .* it holds 'all', 't.* \(did you mean 'val'\?\)"):
        data_of(root=one.root, val_split="vall").dataset("val")
    # If the user gives another root or name, the place in the checkpoint is ignored.
    for change in ({"root": str(tmp_path / "two")}, {"name": str(tmp_path / "two")}):
        assert [*data_of(**one.init_args() | change).dataset("val").samples] == [*two.dataset("val").samples]
    # The folder of another split does not count as train.
    with pytest.raises(ValueError, match=r"has no split 'train', .*; it holds 'all', 'training', 'val'"):
        data_of(name=str(write_tar(tmp_path / "b.tar", [*in_folder("all/training", 3), *in_folder("all/val", 2)])))
    # Archives without class folders are not classes themselves.
    for split in ("train", "val"):
        write_tar(tmp_path / "flat" / f"{split}.tar", [(f"{i}.png", png(i)) for i in range(3)])
    with pytest.raises(
        ValueError, match=r"has no split 'train', .*; it holds 'train', 'val' without class folders: put"
    ):
        data_of(name=str(tmp_path / "flat"))


def test_a_class_may_be_called_as_a_split(tmp_path):
    files = [(f"{name}/{i}.png", png(value)) for name, value in {"car": 1, "train": 2}.items() for i in range(2)]
    plain = data_of(name=str(write_tar(tmp_path / "a.tar", files)), val_split="train")
    assert (plain.class_names, plain.dataset("train").targets) == (["car", "train"], [0, 0, 1, 1])
    files = [(f"{split}/{name}", content) for split in ("train", "val") for name, content in files]
    split = data_of(name=str(write_tar(tmp_path / "b.tar", files)), val_split="val")
    assert [len(split.dataset(name)) for name in ("train", "val")] == [4, 4]


def test_without_classes(tmp_path):
    file = write_tar(tmp_path / "flat.tar", [("b.png", png(2)), ("a.png", png(1))])
    with pytest.raises(ValueError, match=r"flat.tar/a.png is not in a folder: put it into a folder"):
        data_of(name=str(file))
    write_tar(tmp_path / "data" / "train.tar", in_folder("x", 2))
    write_tar(tmp_path / "data" / "test.tar", [("b.png", png(2)), ("a.png", png(1))])
    data = data_of(name=str(tmp_path / "data"), test_split="test")
    assert [name.rsplit("/", 1)[1] for _, name in data.dataset("predict")] == ["a.png", "b.png"]
    for empty, message in {"none": "no tar archive in", "text": "no image in"}.items():
        (tmp_path / empty).mkdir()
        if empty == "text":
            write_tar(tmp_path / empty / "a.tar", [("a.txt", b"")])
        with pytest.raises(ValueError, match=message):
            data_of(name=str(tmp_path / empty))


def test_an_archive_without_images_says_what_it_holds(tmp_path):
    (tmp_path / "x.png").write_bytes(png(1))
    (tmp_path / "link.png").symlink_to(tmp_path / "x.png")
    others = [(".photos/1.png", png(1)), ("cat.tar.gz", b"1"), ("a.heic", b"1"), ("b.heic", b"2")]
    file = write_tar(tmp_path / "a.tar", others)
    with tarfile.open(file, "a") as archive:
        archive.add(tmp_path / "link.png", "ant/1.png")
    message = (
        r"no image in .*a.tar, which holds 2 .heic, 1 not regular \(a link, device or sparse file\), 1 hidden, 1 .gz: "
        "names of images end in"
    )
    for arguments in ({"name": str(file)}, {"predict": str(file), "class_names": list(GREY)}):
        with pytest.warns(UserWarning, match="1 member of another kind"), pytest.raises(ValueError, match=message):
            data_of(**{"name": str(write_tar(tmp_path / "b.tar", in_folder("x", 3))), **arguments}).dataset("predict")
    # `tar --dereference` stores the file that a link points to in this way.
    with tarfile.open(file, "w", dereference=True) as archive:
        archive.add(tmp_path / "link.png", "ant/1.png")
    assert [image.name for image in images_in(str(file))] == ["ant/1.png"]


def test_compressed_archives_in_a_folder_are_named(tmp_path):
    plain = write_tar(tmp_path / "a.tar", in_folder("x", 3))
    packed = tmp_path / "photos" / "a.tar.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(ValueError, match=r"photos/a.tar.gz is compressed: make it a plain .tar, or unpack it"):
        data_of(name=str(packed.parent))
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    assert len(data_of(name=str(packed.parent), val_split="train").dataset("train")) == 9


def test_later_files_replace_those_of_the_same_name_and_hidden_ones_do_not_count(tmp_path):
    files = [("a/1.png", png(1)), ("b/1.png", png(2)), ("./a/1.png", png(3)), ("a/._1.png", b""), (".b/2.png", png(4))]
    data = data_of(name=str(write_tar(tmp_path / "a.tar", files)), val_split="train")
    assert [round(float(image[0, 0, 0]) * 255) for image, _ in data.dataset("train")] == [3, 2]


def test_nothing_but_regular_files_is_read_and_nothing_is_written(tmp_path, monkeypatch):
    (tmp_path / "secret.png").write_bytes(png(66))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    file = tmp_path / "a.tar"
    with tarfile.open(file, "w") as archive:
        for name in ("../cat/1.png", f"{tmp_path}/empty/cat/2.png", "dog/../../../dog/3.png", "dog/4.png"):
            info = tarfile.TarInfo(name)
            info.size = len(png(9))
            archive.addfile(info, io.BytesIO(png(9)))
        sparse = tarfile.TarInfo("dog/GNUSparseFile.0/a.png")
        sparse.pax_headers = {f"GNU.sparse.{key}": text for key, text in SPARSE.items()}
        sparse.size = 4
        archive.addfile(sparse, io.BytesIO(b"abcd"))
        kinds = {"soft": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "null": tarfile.CHRTYPE, "pipe": tarfile.FIFOTYPE}
        for name, kind in kinds.items():
            info = tarfile.TarInfo(f"dog/{name}.png")
            info.type, info.linkname = kind, str(tmp_path / "secret.png")
            archive.addfile(info)
        folder = tarfile.TarInfo("dog/folder.png")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    with pytest.warns(
        UserWarning,
        match=r"5 members of another kind .*: dog/GNUSparse.* \(sparse\); links .*--hard-dereference stores",
    ):
        data = data_of(name=str(file), val_split="train")
    assert sorted(data.dataset("train").targets) == [0, 0, 1, 1]
    for image, _ in data.dataset("train"):
        assert round(float(image[0, 0, 0]) * 255) == 9
    assert all(str(image).startswith(f"{file}/") for image, _ in data.dataset("train").samples)
    assert os.listdir(tmp_path / "empty") == []
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "empty", "secret.png"]


def test_pickles_beside_an_archive_are_not_read(tmp_path):
    """timm reads an index from a pickle file with this name."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    file = write_tar(tmp_path / "photos.tar", in_folder("x", 2))
    for name in ("_photos_tarinfos.pickle", "photos.pickle"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    before = sorted(os.listdir(tmp_path))
    assert len(data_of(name=str(file), val_split="train").dataset("train")) == 6
    assert sorted(os.listdir(tmp_path)) == before


def test_cut_anywhere(tmp_path):
    """An archive ends with blocks of zeros; if the first of them is complete, the rest may be missing."""
    file = write_tar(tmp_path / "all.tar", in_folder("x", 1), format=tarfile.PAX_FORMAT)
    content = file.read_bytes()
    with tarfile.open(file) as archive:
        archive.getmembers()
        end = archive.offset
    cut = tmp_path / "cut.tar"
    for length in [*range(0, end + 512, 256), end - 1, end + 511]:
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut\.tar: not a tar archive, or a truncated or broken one \(.+\); copy"):
            members(str(cut))
    cut.write_bytes(content[: end + 512])
    assert len(members(str(cut))) == 3


def test_bytes_changed_anywhere_never_lose_images_in_silence(tmp_path):
    """Headers have check sums, so an archive with a broken header is refused."""
    file = write_tar(tmp_path / "a.tar", in_folder("x", 1), format=tarfile.USTAR_FORMAT)
    content = file.read_bytes()
    found = members(str(file))
    starts = [0, *(member.offset - 512 for member in found[1:])]
    for start in starts:
        for place in (0, 100, 124, 130, 148, 156, 345):
            changed = bytearray(content)
            changed[start + place] ^= 0x15
            file.write_bytes(changed)
            with pytest.raises(ValueError, match=r"a\.tar: not a tar archive, or"):
                members(str(file))
    # With a negative size, reading would return to the same header for ever.
    header = bytearray(content[:512])
    header[124:136] = b"\xff" * 11 + b"\x00"
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
    file.write_bytes(bytes(header) + content[512:])
    with pytest.raises(ValueError, match=r"a\.tar: not a tar archive, or"):
        members(str(file))
    # The file is two archives, one after the other.
    file.write_bytes(content + content)
    with pytest.raises(ValueError, match=r"the bytes after .* are not a header"):
        members(str(file))


def with_size(header, size, kind):
    """Return a header that claims that many bytes and has a correct check sum."""
    header = bytearray(header)
    header[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    header[156:157] = kind
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


SIZES = [10**6, 8**11 - 1, 2**40, 2**62, 2**63 - 512, 2**63 - 1, 2**64, 2**87]


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("nested", [False, True])
def test_sizes_that_no_file_has(kind, nested, tmp_path):
    """The sizes are of files, and of headers for longer names, which tarfile reads into memory whole."""
    content = write_tar(tmp_path / "inner.tar", in_folder("x", 1), format=tarfile.USTAR_FORMAT).read_bytes()
    file = tmp_path / "a.tar"
    for size in SIZES:
        spoilt = with_size(content[:512], size, kind) + content[512:]
        if nested:
            write_tar(file, [("inner.tar", spoilt)])
        else:
            file.write_bytes(spoilt)
        with pytest.raises(ValueError, match=r"a\.tar: not a tar archive, or a truncated or broken one \(.+\); copy"):
            members(str(file), nested=True)
    # The unchanged archive is accepted.
    file.write_bytes(content)
    assert len(members(str(file), nested=True)) == 3


def test_compressed(tmp_path):
    for kind in ("gztar", "bztar", "xztar", "zip"):
        file = shutil.make_archive(str(tmp_path / "a"), kind, tmp_path)
        with pytest.raises(ValueError, match=r"a\..*: a compressed archive, .*; make it a plain tar, or unpack it"):
            members(file)
    (tmp_path / "a").mkdir()
    shutil.move(file, tmp_path / "a")
    with pytest.raises(ValueError, match=r"a/a\.zip is compressed: make it a plain .tar, or unpack it"):
        data_of(name=str(tmp_path / "a"))


def test_an_archive_that_changes_later(tmp_path):
    file = write_tar(tmp_path / "a.tar", in_folder("x", 1))
    found = members(str(file))
    with open(file, "r+b") as stream:
        stream.truncate(found[-1].offset + 3)
    load_rgb(found[0])
    with pytest.raises(
        UnreadableImageError, match=r"a\.tar/x/cat/000\.png: .*the archive ends before the end of the image"
    ):
        load_rgb(found[-1])
    file.unlink()
    with pytest.raises(UnreadableImageError, match="there is no such file"):
        load_rgb(found[0])
    with pytest.raises(FileNotFoundError, match="no archive at"):
        members(str(file))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files through /proc")
@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_archives_are_closed(tmp_path):
    file = write_tar(tmp_path / "a.tar", in_folder("x", 1))
    before = len(os.listdir("/proc/self/fd"))
    for member in members(str(file)):
        load_rgb(member)
    assert len(os.listdir("/proc/self/fd")) == before
