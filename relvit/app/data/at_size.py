"""Change image size and protocol of a loaded data module, as `relvit resolutions` does."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset
from torchvision.transforms import v2

from relvit.app.data.field import Fill
from relvit.app.data.shape import ImageShape
from relvit.app.data.transforms import SizeProtocol, eval_transform, parse_size
from relvit.utils.messages import an

if TYPE_CHECKING:
    from relvit.app.data.modules.base import ImageData, Split


def at_size(
    data: ImageData,
    img_size: int | tuple[int, int],
    split: Split = "test",
    protocol: SizeProtocol = "crop",
    fill: Fill | None = None,
    squash: int | tuple[int, int] | None = None,
) -> ImageData:
    """Return a copy of a data module whose `test_dataloader` has a split at another size.

    The copy shares the files or images of val or test with `data`, which finds or loads them only once. The copy shares
    the training images only if `data` has built the dataset of train already. If the images of `data` keep their shapes
    (`native`), the images of the copy nevertheless all have one size.

    Args:
        data: a data module, whose `img_size` is the size in training. The loaders of `data` itself do not change.
        img_size: one number or (height, width); with `squash`, images are resized to `squash` at the end.
        split: 'train' (without augmentation), 'val' or 'test'.
        protocol, fill, squash: see :func:`relvit.app.data.eval_transform`.

    Raises:
        ValueError: `img_size` or `squash` is neither a positive integer nor two of them.
        ValueError: `protocol` or `fill` is unknown, or `fill` is given with another protocol than 'field'.
        ValueError: `split` does not exist, or its dataset has no attribute `transform`.
    """
    own = copy.copy(data)
    own.trainer, own.unreadable, own.evaluated_split = None, {}, split
    own.shape = ImageShape(parse_size(img_size if squash is None else squash))
    own.img_size = own.shape.img_size
    images = img_size, own.mean, own.std, own.crop_pct
    own.eval_transform = eval_transform(*images, protocol, data.img_size, fill, squash)
    if split not in data._datasets:
        data.prepare_data()
    # For train, `data.dataset` would build the augmented dataset, and with `cache` decode all images. So do not call
    # `data.dataset`, and share the dataset of train only if it is built already.
    known = data._datasets.get(split) if split == "train" else data.dataset(split)
    own._datasets = {}
    if known is not None:
        own._datasets[split] = with_transform(data, known, own.eval_transform)
    return own


def with_transform(data: ImageData, dataset: Dataset[Any], transform: v2.Compose) -> Dataset[Any]:
    """Return a copy of a dataset that a data module has built, with another transform.

    Raises:
        ValueError: The dataset has no attribute `transform`.
    """
    if not hasattr(dataset, "transform"):
        raise ValueError(
            f"{type(data).__name__} builds {an(type(dataset).__name__)}, whose images cannot get another size: it has "
            "no attribute `transform`, which relvit.app.data.DatasetData gives any dataset"
        )
    own: Any = copy.copy(dataset)
    own.transform = transform
    return own
