"""ImageNetData: class names by file or by id, labels of a checkpoint."""

import pytest
import torch
from grey_folders import add

from relvit.app.data import ImageNetData

WNIDS = ["n01440764", "n02012849", "n03126707"]


def test_names_from_torchvisions_file_or_none(tmp_path):
    for wnid in WNIDS:
        add(tmp_path / "val" / wnid)
    assert ImageNetData(str(tmp_path)).class_names == WNIDS  # There is no train, so the classes come from val.
    words = {"n01440764": ("tench", "Tinca tinca"), "n02012849": ("crane",), "n03126707": ("winch", "crane")}
    torch.save((words, []), tmp_path / "meta.bin")
    assert ImageNetData(str(tmp_path)).class_names == ["tench", "crane", "winch"]
    (tmp_path / "val" / "n77777777").mkdir()
    with pytest.raises(ValueError, match=r"meta\.bin does not know 'n77777777'"):
        ImageNetData(str(tmp_path))


def test_a_checkpoints_classes_keep_their_labels(tmp_path):
    add(tmp_path / "val" / WNIDS[2])
    data = ImageNetData(str(tmp_path), wnids=WNIDS, class_names=["a", "b", "c"])
    assert data.dataset("val").targets == [2]
    with pytest.raises(ValueError, match="class_names holds 2 names; give 3, one for each of wnids"):
        ImageNetData(str(tmp_path), wnids=WNIDS, class_names=["a", "b"])
    message = r"holds 2 names; .*val has 1 class folder: give wnids \(--data.wnids\), .* of each of the 2 classes, or"
    with pytest.raises(ValueError, match=message):
        ImageNetData(str(tmp_path), class_names=["a", "b"])
    assert ImageNetData(str(tmp_path), wnids=WNIDS[1:], class_names=["a", "b"]).dataset("val").targets == [1]
    (tmp_path / "val" / "cats").mkdir()
    with pytest.raises(ValueError, match=r"'cats' are not WordNet ids such as 'n01440764': use ImageFolderData"):
        ImageNetData(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"neither train nor val in .*; make them with tools/prepare_imagenet"):
        ImageNetData(str(tmp_path / "empty"))
