"""Class folders in tar archives."""

import os
from collections.abc import Sequence

from relvit.data.archives.stored import Content, Reader
from relvit.data.archives.tar import Member, members
from relvit.data.files.dataset import files_below
from relvit.data.files.images import IMAGE_ENDINGS
from relvit.utils.messages import did_you_mean, listing

_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "eval", "test", "testing"}


class TarFolders(Reader):
    """Images in a tar archive, or in all archives below a folder.

    Archives count as folders of their names, without ``.tar``, also archives in an archive; that which is the place
    itself does not. The class of an image is the folder that holds it. A split is what lies in the folder of its name,
    wherever that is, be it made of archives or else in them; where there is none, 'train' is everything. Files without
    the extension of an image and hidden ones are passed over, and images beside the class folders of a split.

    Args:
        place: The archive, or the folder.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._members: dict[str, list[Member]] = {}

    def find(self, split: str, labelled: bool) -> Content:
        """The images of a split in the order of their names, see :class:`Reader`."""
        files = self._archives()
        named = [file for file in files if _inside(_folders(f"{self._relative(file)}/"), split)]
        found = self._in_split(named, split, labelled) or self._in_split(files, split, labelled)
        if not found:
            found = self._placed(files)
            self._check_all_are(split, [folders for _, folders in found])
        found.sort(key=lambda placed: self.key(placed[0]))
        if labelled and (bare := [image for image, folders in found if not folders]):
            raise ValueError(f"{bare[0]} lies in no folder, which would be its class; put it into one")
        labels = [folders[-1] for _, folders in found] if labelled else ()
        return Content([image for image, _ in found], labels)

    def key(self, image: Member) -> str:
        """The archive, if there are several, and the name in it."""
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
            raise ValueError(
                f"no tar archive in {self.place}; for images in folders use --data ImageFolderData, for Hugging Face "
                "datasets and WebDataset shards a name that begins with hfds/ or wds/"
            )
        return found

    def _placed(self, files: Sequence[str]) -> list[tuple[Member, list[str]]]:
        """The images of some archives, each with the folders above it."""
        return [(image, _folders(self.key(image))) for file in files for image in self._images(file)]

    def _in_split(self, files: Sequence[str], split: str, labelled: bool) -> list[tuple[Member, list[str]]]:
        # The last folder is a class, even if it is called as the split.
        upper = slice(-1) if labelled else slice(None)
        return [(image, folders) for image, folders in self._placed(files) if _inside(folders[upper], split)]

    def _images(self, file: str) -> list[Member]:
        if file not in self._members:
            self._members[file] = images_in(file)
        return self._members[file]

    def _check_all_are(self, split: str, folders: Sequence[Sequence[str]]) -> None:
        """Everything stands for train where there are no splits; it must not where there are others."""
        if not folders:
            raise ValueError(
                f"no image in {self.place}; the names of images end in .jpg, .png, .webp, .tif, .gif or the like"
            )
        parents = sorted({name for path in folders for name in path[:-1]})
        if split == "train" and not _SPLIT_NAMES & {name.lower() for name in parents}:
            return
        there = f"it holds {listing(parents)}" if parents else "it holds class folders alone"
        raise ValueError(
            f"no folder or archive {split!r} with class folders in {self.place}{did_you_mean(split, parents)}; {there}"
        )


def images_in(file: str) -> list[Member]:
    """All images of one archive, and of archives in it; of each name the last one, as unpacking would leave it. Hidden
    files are passed over.

    Raises:
        FileNotFoundError, ValueError: See :func:`relvit.data.archives.tar.members`.
    """
    return list({member.name: member for member in members(file, nested=True) if _is_image(member.name)}.values())


def _folders(key: str) -> list[str]:
    """The folders above an image."""
    return [part.removesuffix(".tar") for part in key.split("/")[:-1] if part not in ("", "..")]


def _inside(folders: Sequence[str], split: str) -> bool:
    wanted = split.strip("/").removesuffix(".tar").split("/")
    return any(list(folders[i : i + len(wanted)]) == wanted for i in range(len(folders)))


def _is_image(name: str) -> bool:
    hidden = any(part.startswith(".") and part != ".." for part in name.split("/"))
    return name.lower().endswith(IMAGE_ENDINGS) and not hidden
