"""ImagePathsData: images without labels to predict, named on a command line by files, folders and patterns."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset
from torchvision.transforms import v2

from relvit.app.data.images.file_datasets import NamedFiles, OnError
from relvit.app.data.images.folders import find_images
from relvit.app.data.modules.base import ImageData, Split


class ImagePathsData(ImageData):
    """Images to predict by paths, for the classes and the image size of a model.

    Args:
        paths: Files, folders with all images below them, and patterns, see `find_images`.
        mean: Mean of each channel, in units of the range 0..1; if there is one channel, images are converted to grey.
        on_error: What to do about a file that cannot be read: 'skip' goes on without the file, 'error' stops and names
            the file.
        class_names, img_size, std, crop_pct, batch_size, num_workers, native, max_tokens, patch_size: See
            :class:`relvit.app.data.ImageData`.

    Raises:
        ValueError: An argument is out of its range; or, when the images are first used, a folder or a pattern has no
            images, see `find_images`.
    """

    # `relvit predict` builds this data module from paths. The module has no images to train on, so `--data` does not
    # offer the module.
    chosen_by_name = False

    def __init__(
        self,
        paths: Sequence[str],
        class_names: list[str],
        img_size: int | tuple[int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        crop_pct: float,
        batch_size: int = 64,
        num_workers: int = 2,
        on_error: OnError = "skip",
        native: bool = False,
        max_tokens: int | None = None,
        patch_size: int | tuple[int, int] = 16,
    ) -> None:
        if len(mean) not in (1, 3):
            raise ValueError(
                f"the model takes images of {len(mean)} channels; files can be read with 1 or 3: take another model"
            )
        sizes: dict[str, Any] = {"img_size": img_size, "crop_pct": crop_pct}
        sizes |= {"native": native, "max_tokens": max_tokens, "patch_size": patch_size}
        loading = {"batch_size": batch_size, "num_workers": num_workers}
        super().__init__(class_names, len(mean), augment="none", mean=mean, std=std, **sizes, **loading)
        self.paths: list[str] = list(paths)
        self.on_error: OnError = on_error

    def missing(self, split: Split) -> str | None:
        """Explain that there are no splits with labels."""
        return None if split == "predict" else f"images without labels can only be predicted: there is no {split}"

    def build(self, split: Split) -> Dataset[Any]:
        """Build the dataset of the images to predict; looks for the files."""
        return NamedFiles(find_images(self.paths), self.file_transform)

    @property
    def file_transform(self) -> v2.Compose:
        """The transform of evaluation for image files, which are read in colour."""
        transform = self.eval_transform
        return v2.Compose([v2.Grayscale(), *transform.transforms]) if self.in_chans == 1 else transform
