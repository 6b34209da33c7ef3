"""Tar archives of class folders: find their images by the headers once, read them at random, unpack nothing."""

import os
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from relvit.app.data.archives.reader import Content, Reader
from relvit.app.data.images.decode import IMAGE_ENDINGS, StoredImage
from relvit.app.data.images.folders import files_below
from relvit.app.utils.shown_text import counted, visible
from relvit.utils.messages import did_you_mean, listing

_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "eval", "test", "testing"}

# Zip archives, and files that gzip, bzip2, xz or zstandard has compressed, begin with one of these byte sequences.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")
_CHUNK = 1 << 20
_LINKS = "links are not followed (GNU tar --dereference --hard-dereference stores the files themselves)"


@dataclass(frozen=True, slots=True)
class Member(StoredImage):
    """A regular file in an archive.

    Args:
        file: The archive.
        name: Name of the member in the archive, never used as a path on disk.
        offset: Position of the content in the archive, in bytes.
        size: Length of the content in bytes.
    """

    file: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Read the content. Opens the archive each time: processes must not share a handle and its position."""
        with open(self.file, "rb") as stream:
            return self.read_from(stream)

    def read_from(self, stream: BinaryIO) -> bytes:
        """Read the content from the opened archive.

        Raises:
            EOFError: The archive has become shorter.
        """
        stream.seek(self.offset)
        content = stream.read(self.size)
        if len(content) < self.size:
            raise EOFError("the archive ends before the end of the image; copy the archive again")
        return content

    def __str__(self) -> str:
        return f"{self.file}/{self.name}"


def members(file: str, nested: bool = False) -> list[Member]:
    """List all regular files of an uncompressed tar archive in the archive's order, duplicate names included.

    Links, devices and sparse files are left out with a warning.

    Args:
        file: The archive.
        nested: Whether archives in the archive are replaced by their members, named ``inner.tar/name``. Archives inside
            these inner archives are not opened.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is compressed, truncated, damaged, not a tar archive, or has data after the end of the
            archive.
    """
    found, left_out = _read(file, nested)
    if left_out:
        warnings.warn(
            f"{file} holds {counted(len(left_out), 'member')} of another kind than regular files, left out: "
            f"{visible(left_out[0])}; {_LINKS}",
            stacklevel=2,
        )
    return found


def none_in(place: str, files: Sequence[str]) -> str:
    """Write the message that archives hold no image: what they hold, and what counts as an image."""
    counts: Counter[str] = Counter()
    for file in files:
        found, left_out = _read(file, nested=True)
        counts["not regular (a link, device or sparse file)"] += len(left_out)
        for member in found:
            ending = os.path.splitext(member.name)[1].lower() or "without an ending"
            counts["hidden" if _is_hidden(member.name) else ending] += 1
    held = ", ".join(f"{count} {visible(kind)}" for kind, count in counts.most_common(6) if count)
    return (
        f"no image in {place}, which holds {held or 'no files'}: names of images end in .jpg, .png, .webp, .tif, .gif "
        "or the like, and neither they nor their folders begin with '.'; of archives in an archive, only .tar is "
        f"opened; {_LINKS}"
    )


def _read(file: str, nested: bool) -> tuple[list[Member], list[str]]:
    """List the regular files of an archive, and name what else is in it; arguments and errors as of `members`."""
    if not os.path.isfile(file):
        problem = f"{file} is a folder, not an archive" if os.path.isdir(file) else f"no archive at {file}"
        raise FileNotFoundError(f"{problem}; correct the name as given or in _info.json, or copy the archive there")
    left_out: list[str] = []
    try:
        with open(file, "rb") as stream:
            found = list(_walk(stream, file, "", 0, nested, left_out))
    except (OSError, MemoryError):
        raise
    # For broken headers `tarfile` raises its own errors, but also ValueError, OverflowError and others, so catch all of
    # them.
    except Exception as error:
        raise ValueError(f"{file}: {_reason(file, error)}") from error
    return found, left_out


class TarFolders(Reader):
    """Images in class folders in a tar archive, or in all archives below a folder.

    An archive counts as a folder with the archive's name without ``.tar``, and so does an archive in an archive. If
    `place` itself is an archive, it does not count as a folder. The class of an image is the folder that contains the
    image. A split is everything in the folder with the split's name, at any depth: a folder of archives, or a folder in
    an archive. If no folder has the name of a split (train, val, test or similar), the split 'train' is everything. The
    reader leaves out hidden files, files without the extension of an image, and images beside the class folders of a
    split.

    Args:
        place: The archive, or the folder.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._members: dict[str, list[Member]] = {}

    def find(self, split: str, labelled: bool) -> Content:
        """Find the images of a split in the order of their names, see :class:`Reader`."""
        files = self._archives()
        named = [file for file in files if _inside(_folders(f"{self._relative(file)}/"), split)]
        found = self._in_split(named, split, labelled) or self._in_split(files, split, labelled)
        if not found:
            found = self._with_folders(files)
            if not found:
                raise ValueError(none_in(self.place, files))
            self._check_all_are(split, [folders for _, folders in found])
        # The path of each archive is known, but the folders in it only if the archive has been read.
        names = {name for file in files for name in _folders(f"{self._relative(file)}/")}
        read = (image for images in self._members.values() for image in images)
        self.splits: Sequence[str] = sorted(names.union(*(_folders(self.key(image))[:-1] for image in read)))
        found.sort(key=lambda pair: self.key(pair[0]))
        if labelled and (bare := [image for image, folders in found if not folders]):
            raise ValueError(
                f"{visible(str(bare[0]))} is not in a folder: put it into a folder with the name of its class"
            )
        labels = [folders[-1] for _, folders in found] if labelled else ()
        return Content([image for image, _ in found], labels)

    def key(self, image: Member) -> str:
        """Name an image by the archive, if there are several, and the name in it."""
        return f"{self._relative(image.file)}/{image.name}".lstrip("/")

    def _relative(self, file: str) -> str:
        return file[len(self.place) :].lstrip("/")

    def _archives(self) -> list[str]:
        if os.path.isfile(self.place):
            return [self.place]
        if not os.path.isdir(self.place):
            raise FileNotFoundError(f"neither a tar archive nor a folder of them at {self.place}; correct the name")
        found = files_below(self.place, (".tar",))
        if not found:
            endings = (".zip", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
            if packed := files_below(self.place, endings):
                raise ValueError(f"{packed[0]} is compressed: make it a plain .tar, or unpack it")
            raise ValueError(
                f"no tar archive in {self.place}; for images in folders use --data ImageFolderData, for Hugging Face "
                "datasets and WebDataset shards a name that begins with hfds/ or wds/"
            )
        return found

    def _with_folders(self, files: Sequence[str]) -> list[tuple[Member, list[str]]]:
        """List the images of archives, each with the folders above it."""
        return [(image, _folders(self.key(image))) for file in files for image in self._images(file)]

    def _in_split(self, files: Sequence[str], split: str, labelled: bool) -> list[tuple[Member, list[str]]]:
        # If labels are needed, the last folder of a path is the class, even if it has the same name as the split, so
        # only the folders above it can be the split.
        upper = slice(-1) if labelled else slice(None)
        return [(image, folders) for image, folders in self._with_folders(files) if _inside(folders[upper], split)]

    def _images(self, file: str) -> list[Member]:
        if file not in self._members:
            self._members[file] = images_in(file)
        return self._members[file]

    def _check_all_are(self, split: str, folders: Sequence[Sequence[str]]) -> None:
        """Check that the data have no splits, so that everything is train."""
        parents = sorted({name for path in folders for name in path[:-1]})
        lowest = sorted({name for path in folders for name in path[-1:]})
        # Flat archives train.tar and val.tar are splits without class folders, not the classes 'train' and 'val'.
        flat = bool(lowest) and _SPLIT_NAMES.issuperset(name.lower() for name in lowest)
        if split == "train" and not flat and not _SPLIT_NAMES & {name.lower() for name in parents}:
            return
        if flat:
            there = f"{listing(lowest)} without class folders: put the images of each class into a folder"
        else:
            there = listing(parents) if parents else "only class folders, which all count as train"
        raise ValueError(
            f"{self.place} has no split {split!r}, neither as a folder with class folders nor as an archive; it holds "
            f"{there}{did_you_mean(split, parents)}"
        )


def images_in(file: str) -> list[Member]:
    """List all images of an archive and of archives in it; of equal names keep the last image, as unpacking does.

    Raises:
        FileNotFoundError, ValueError: See :func:`members`.
    """
    return list({member.name: member for member in members(file, nested=True) if _is_image(member.name)}.values())


class _Bounded:
    """A stream of known length that seeks and reads no further than its end.

    `tarfile` trusts the sizes in headers, and a corrupt header may claim any size.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.tell = stream.tell
        self.length: int = stream.seek(0, os.SEEK_END)
        stream.seek(0)

    def seekable(self) -> bool:
        return True

    def seek(self, position: int) -> int:
        return self.stream.seek(min(position, self.length))

    def read(self, size: int) -> bytes:
        return self.stream.read(min(size, self.length - self.tell()))


def _walk(stream: BinaryIO, file: str, prefix: str, start: int, nested: bool, left_out: list[str]) -> Iterator[Member]:
    """Walk the members of one archive, which begins at byte `start` of the file; their names get the prefix."""
    # With 'backslashreplace', names that are not UTF-8 stay different from each other, and can be printed.
    with tarfile.open(fileobj=_Bounded(stream), mode="r:", encoding="utf-8", errors="backslashreplace") as archive:
        while (info := archive.next()) is not None:
            # `tarfile` keeps the headers of all members, which could fill the memory, so clear this list.
            archive.members.clear()
            if archive.offset <= info.offset:
                raise tarfile.ReadError(f"a header of negative size at byte {start + info.offset}")
            name = prefix + "/".join(part for part in info.name.split("/") if part not in ("", "."))
            if info.isdir():
                continue
            if not info.isreg() or info.issparse():
                left_out.append(f"{name} ({'sparse' if info.issparse() else 'a link or device'})")
            elif nested and name.lower().endswith(".tar"):
                inner = archive.extractfile(info)
                try:
                    yield from _walk(inner, file, f"{name}/", start + info.offset_data, False, left_out)
                except tarfile.TarError as error:
                    raise tarfile.ReadError(f"in {visible(name)}: {error}") from error
            else:
                yield Member(file, name, start + info.offset_data, info.size)
        _check_end(stream, archive.offset)


def _check_end(stream: BinaryIO, offset: int) -> None:
    """Check that an archive ends with blocks of zeros: tarfile takes anything else than a header as the end."""
    stream.seek(offset)
    chunk = stream.read(_CHUNK)
    if len(chunk) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("the zeros at its end are missing")
    while chunk:
        if chunk.strip(b"\0"):
            raise tarfile.ReadError(f"the bytes after {offset} are not a header")
        chunk = stream.read(_CHUNK)


def _reason(file: str, error: Exception) -> str:
    with open(file, "rb") as stream:
        start = stream.read(8)
    if start.startswith(_COMPRESSED):
        return "a compressed archive, whose images cannot be read without unpacking; make it a plain tar, or unpack it"
    reason = str(error) or type(error).__name__
    return f"not a tar archive, or a truncated or broken one ({reason}); copy it anew, or delete it"


def _folders(key: str) -> list[str]:
    """Return the folders above an image."""
    return [part.removesuffix(".tar") for part in key.split("/")[:-1] if part not in ("", "..")]


def _inside(folders: Sequence[str], split: str) -> bool:
    wanted = split.strip("/").removesuffix(".tar").split("/")
    return any(list(folders[i : i + len(wanted)]) == wanted for i in range(len(folders)))


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS) and not _is_hidden(name)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part != ".." for part in name.split("/"))
