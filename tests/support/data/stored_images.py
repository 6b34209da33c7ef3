"""Uniformly grey images (see grey_folders) in Parquet files, WebDataset shards and tar archives."""

import io
import json
import tarfile
from pathlib import Path

import webdataset
from grey_folders import AS_STORED, GREY
from PIL import Image

from relvit.app.data import ReaderData

KINDS = ("hfds", "wds", "tar")


def png(value, size=(6, 4)):
    stream = io.BytesIO()
    Image.new("L", size, value).save(stream, "PNG")
    return stream.getvalue()


def grey_files(count):
    """List ``ant/000.png`` and so on, with content and class, this number of each class."""
    return [(f"{name}/{i:03d}.png", png(value), name) for name, value in GREY.items() for i in range(count)]


def write_tar(path, files, **options):
    """Write a tar archive of names and contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_shards(pattern, samples, **options):
    """Write shards with webdataset's writer."""
    Path(pattern).parent.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(pattern), verbose=0, **options) as writer:
        for sample in samples:
            writer.write(sample)


def write_parquet(path, files, label=None):
    """Write (file name, content, label) to a Parquet file by `datasets`; `label` is the feature of the labels."""
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({"image": datasets.Image(), "label": label or datasets.Value("string")})
    images = [{"path": name, "bytes": content} for name, content, _ in files]
    table = {"image": images, "label": [label for _, _, label in files]}
    datasets.Dataset.from_dict(table, features=features).to_parquet(path)


def write(kind, root, splits):
    """Write splits of (name, content, class) in a format; return the arguments for the data."""
    match kind:
        case "hfds":
            for split, files in splits.items():
                write_parquet(root / "data" / f"{split}-00000-of-00001.parquet", files)
            return {"name": f"hfds/{root}", "root": str(root / "cache")}
        case "wds":
            for split, files in splits.items():
                samples = [{"__key__": name.split(".")[0], "png": data, "cls": label} for name, data, label in files]
                write_shards(root / f"{split}-%03d.tar", samples, maxcount=7)
            names = {split: sorted(path.name for path in root.glob(f"{split}-*.tar")) for split in splits}
            info = {"splits": {split: {"name": split, "filenames": names[split]} for split in splits}}
            (root / "_info.json").write_text(json.dumps(info))
            return {"name": "wds/greys", "root": str(root)}
        case "tar":
            for split, files in splits.items():
                write_tar(root / f"{split}.tar", [file[:2] for file in files])
            return {"name": str(root)}


def data_of(**arguments):
    return ReaderData(**AS_STORED | arguments)
