"""Colour images in memory; small ones of one size are augmented a whole batch at a time."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from relvit.data.files.images import UnreadableImageError
from relvit.data.transforms import Augment


class BatchTransform:
    """What `eval_transform`, or `train_transform` with 'shift' or 'crop-flip', does to images that already have the
    right size, for a batch at once: padding with zeros, a random crop and flip for each image, normalisation.

    Some 20 times as fast as image by image: tools/loading.py measures it.

    Args:
        mean: Mean of red, green and blue, in units of the range 0..1.
        std: Standard deviation of each, in the same units.
        padding: Rows above and below, columns left and right that are added before the crop; (0, 0) crops nothing.
        flip: Whether half of the images are mirrored.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], padding: tuple[int, int], flip: bool) -> None:
        self.mean = 255 * torch.tensor(mean)[:, None, None]
        self.std = 255 * torch.tensor(std)[:, None, None]
        self.padding = padding
        self.flip = flip

    def __call__(self, pixels: Tensor) -> Tensor:
        """Packed pixels int32 (B, H, W) -> float32 (B, 3, H, W)."""
        B, H, W = pixels.shape
        rows, columns = torch.arange(H).expand(B, H), torch.arange(W).expand(B, W)
        if self.flip:
            columns = torch.where(torch.rand(B, 1) < 0.5, W - 1 - columns, columns)
        above, left = self.padding
        if above or left:
            pixels = F.pad(pixels, (left, left, above, above))
            rows = rows + torch.randint(2 * above + 1, (B, 1))
            columns = columns + torch.randint(2 * left + 1, (B, 1))
        places = rows[:, :, None] * pixels.shape[2] + columns[:, None]
        chosen = pixels.flatten(1).gather(1, places.flatten(1)).view(B, H, W)
        images = unpack(chosen).permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return images.sub_(self.mean).div_(self.std)


def batch_transform(
    stored: tuple[int, int],
    size: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    augment: Augment,
    crop_pct: float = 1.0,
    color_jitter: float | None = None,
    random_erasing: float | None = None,
) -> BatchTransform | None:
    """The same as `train_transform` for batches of images of the size `stored`, or None if it has no such form: where
    images are resized, and with any other augmentation than 'none', 'shift' and 'crop-flip'."""
    same_size = stored == size and (augment != "none" or crop_pct == 1)
    if not same_size or augment not in ("none", "shift", "crop-flip") or color_jitter or random_erasing:
        return None
    padding = (0, 0) if augment == "none" else (max(1, size[0] // 8), max(1, size[1] // 8))
    return BatchTransform(mean, std, padding, flip=augment == "crop-flip")


def pack(images: np.ndarray) -> Tensor:
    """uint8 (N, H, W, 3) -> int32 (N, H, W), the fourth byte zero: pixels move as one number, three times as fast."""
    packed = np.zeros((*images.shape[:3], 4), np.uint8)
    packed[..., :3] = images
    return torch.from_numpy(packed).view(torch.int32).squeeze(-1)


def unpack(pixels: Tensor) -> Tensor:
    """int32 (..., H, W) -> uint8 (..., H, W, 3), a view."""
    return pixels.unsqueeze(-1).view(torch.uint8)[..., :3]


class Failure(NamedTuple):
    """Arguments of the UnreadableImageError of a file."""

    message: str
    path: str
    reason: str


class ImagesInMemory(Dataset):
    """Decoded colour images; loader workers share the memory. Items are ``(image, target)``, float32 (3, H, W).

    Args:
        targets: N labels or names.
        transform: From a PIL image of mode 'RGB' to a tensor.
        unreadable: What is wrong with the files that could not be decoded, by their index.
    """

    def __init__(
        self,
        targets: Sequence[int] | Sequence[str],
        transform: v2.Compose,
        unreadable: Mapping[int, Failure] | None = None,
    ) -> None:
        self.targets = targets
        self.transform = transform
        self.unreadable = dict(unreadable or {})

    @abstractmethod
    def values(self, index: int) -> np.ndarray:
        """The pixels of one image, uint8 (H, W, 3)."""

    def __len__(self) -> int:
        return len(self.targets)

    def check(self, index: int) -> None:
        """Raise an UnreadableImageError if this image could not be decoded."""
        if index in self.unreadable:
            raise UnreadableImageError(*self.unreadable[index])

    def __getitem__(self, index: int) -> tuple[Tensor, int | str]:
        place = range(len(self))[index]
        self.check(place)
        return self.transform(Image.fromarray(self.values(place))), self.targets[place]


class MemoryImages(ImagesInMemory):
    """Images of one size.

    Args:
        pixels: Packed pixels int32 (N, H, W), see `pack`; any for those that are unreadable.
        targets, transform, unreadable: See `ImagesInMemory`.
    """

    def __init__(self, pixels: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pixels = pixels

    def values(self, index: int) -> np.ndarray:
        """The pixels of one image, uint8 (H, W, 3)."""
        return unpack(self.pixels[index]).contiguous().numpy()


class OwnSizeImages(ImagesInMemory):
    """Images of any sizes, one behind the other in one tensor, so that workers copy nothing however many there are.

    Args:
        pixels: uint8, at least the sum of 3 H W over all images.
        sizes: Height and width of each, int64 (N, 2); zeros for those that are unreadable.
        targets, transform, unreadable: See `ImagesInMemory`.
    """

    def __init__(self, pixels: Tensor, sizes: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pixels = pixels
        self.sizes = sizes
        self.ends = (3 * sizes.prod(1)).cumsum(0)

    def values(self, index: int) -> np.ndarray:
        """The pixels of one image, uint8 (H, W, 3), a view."""
        height, width = self.sizes[index].tolist()
        end = int(self.ends[index])
        return self.pixels[end - 3 * height * width : end].view(height, width, 3).numpy()


class WholeBatches(Dataset):
    """The same images for a loader with `as_it_is` as its collate_fn: whole batches, transformed at once.

    Args:
        images: The images; their own transform is not used.
        transform: The transform of a batch.
    """

    def __init__(self, images: MemoryImages, transform: BatchTransform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor | list[str]]:
        """Images float32 (B, 3, H, W), and labels int64 (B,) or names. The loader calls this with a batch's indices."""
        chosen = [self.images.targets[index] for index in indices]
        images = self.transform(self.images.pixels[torch.as_tensor(indices)])
        return images, chosen if isinstance(chosen[0], str) else torch.as_tensor(chosen)


def as_it_is(batch: Any) -> Any:
    """The batch."""
    return batch
