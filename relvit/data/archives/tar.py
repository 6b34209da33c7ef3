"""Images in uncompressed tar archives, read where they lie: found once by the headers, nothing is ever unpacked."""

import os
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from relvit.data.files.images import StoredImage

# First bytes of compressed files: gzip, bzip2, xz, zstandard.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Member(StoredImage):
    """A regular file in an archive.

    Args:
        file: The archive.
        name: Its name in the archive; a name like any other, which is never used as a path.
        offset: Where in the archive its content begins, in bytes.
        size: Length of its content in bytes.
    """

    file: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The content. Opens the archive each time: processes must not share a handle and its position."""
        with open(self.file, "rb") as stream:
            return self.read_from(stream)

    def read_from(self, stream: BinaryIO) -> bytes:
        """The content, from the archive that is open already.

        Raises:
            EOFError: The archive has become shorter.
        """
        stream.seek(self.offset)
        content = stream.read(self.size)
        if len(content) < self.size:
            raise EOFError("the archive ends before it")
        return content

    def __str__(self) -> str:
        return f"{self.file}/{self.name}"


def members(file: str, nested: bool = False) -> list[Member]:
    """All regular files of an uncompressed tar archive in its order, those of the same name, too.

    Folders are passed over in silence; links, devices and sparse files are left out with a warning.

    Args:
        file: The archive.
        nested: Whether the members of archives in the archive take their place, named ``inner.tar/name``; one deep.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Compressed, truncated, broken, or not a tar archive at all; something behind the end of the archive.
    """
    if not os.path.isfile(file):
        raise FileNotFoundError(f"no archive at {file}; correct the name")
    left_out: list[str] = []
    try:
        with open(file, "rb") as stream:
            found = list(_walk(stream, file, "", 0, nested, left_out))
    except (OSError, MemoryError):
        raise
    # Broken headers make tarfile raise ValueError, OverflowError and others besides its own errors.
    except Exception as error:
        raise ValueError(f"{file}: {_reason(file, error)}") from error
    if left_out:
        warnings.warn(
            f"{file} holds {len(left_out)} members that are no regular files, left out: {left_out[0]}", stacklevel=2
        )
    return found


def read_all(wanted: Sequence[Member]) -> Iterator[bytes]:
    """The contents of members of one archive, which is opened once.

    Raises:
        ValueError: The archive has become shorter.
    """
    if not wanted:
        return
    with open(wanted[0].file, "rb") as stream:
        for member in wanted:
            try:
                yield member.read_from(stream)
            except EOFError as error:
                raise ValueError(f"cannot read {member}: {error}; copy the archive anew") from error


def _walk(stream: BinaryIO, file: str, prefix: str, start: int, nested: bool, left_out: list[str]) -> Iterator[Member]:
    """The members of one archive, which begins at `start` of the file and whose names get the prefix."""
    # No two undecodable names may become the same one, nor one that cannot be printed.
    with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="backslashreplace") as archive:
        while (info := archive.next()) is not None:
            # It would keep the headers of all.
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
                    raise tarfile.ReadError(f"in {name}: {error}") from error
            else:
                yield Member(file, name, start + info.offset_data, info.size)
        _check_end(stream, archive.offset)


def _check_end(stream: BinaryIO, offset: int) -> None:
    """The end is blocks of zeros; tarfile takes whatever is no header for the end."""
    stream.seek(offset)
    chunk = stream.read(_CHUNK)
    if len(chunk) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it has no end")
    while chunk:
        if chunk.strip(b"\0"):
            raise tarfile.ReadError(f"what comes after byte {offset} is no header")
        chunk = stream.read(_CHUNK)


def _reason(file: str, error: Exception) -> str:
    with open(file, "rb") as stream:
        start = stream.read(8)
    if start.startswith(_COMPRESSED):
        return "a compressed archive, in which images cannot be found without unpacking; decompress it to a plain tar"
    reason = str(error) or type(error).__name__
    return f"not a tar archive, or a truncated or broken one ({reason}); copy it anew, or delete it"
