"""Hostile files that create a marker file if code in them runs."""

import io
import os
import pickle
import tarfile
import zipfile

import torch


class Payload:
    """An object whose pickle calls `os.system`."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def saved(path, content, **options):
    torch.save(content, path, **options)
    return path


def checkpoints(valid, folder, marker):
    """Write hostile checkpoints that are derived from a valid one; return them by name."""
    content, payload = torch.load(valid, weights_only=True), Payload(marker)
    spoilt = {
        "in_state_dict": content | {"state_dict": content["state_dict"] | {"x": payload}},
        "in_hyper_parameters": content | {"hyper_parameters": {"x": payload}},
        "in_relvit": content | {"relvit": content["relvit"] | {"x": payload}},
        "as_key": content | {payload: 1},
    }
    files = {name: saved(folder / f"{name}.ckpt", value) for name, value in spoilt.items()}
    files["legacy"] = saved(folder / "legacy.ckpt", spoilt["in_relvit"], _use_new_zipfile_serialization=False)
    files["pickle"] = folder / "pickle.ckpt"
    files["pickle"].write_bytes(pickle.dumps(payload))
    files["tar"] = folder / "tar.ckpt"
    with tarfile.open(files["tar"], "w") as tar:
        for name in ("sys_info", "pickle", "storages", "../outside"):
            data = pickle.dumps(payload)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    files["torchscript"] = folder / "script.ckpt"
    torch.jit.script(torch.nn.Linear(1, 1)).save(files["torchscript"])
    return files


def bombs(valid, folder):
    """Write checkpoints that would unpack to many more bytes than they have, or outside of the folder."""
    files = {name: folder / f"{name}.ckpt" for name in ("deflated", "overlapping", "outside")}
    with zipfile.ZipFile(valid) as old:
        entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
    with zipfile.ZipFile(files["deflated"], "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in entries:
            new.writestr(name, bytes(2**24) if name.endswith("data/0") else data)
    with zipfile.ZipFile(files["overlapping"], "w") as new:
        for name, data in entries:
            new.writestr(name, data)
        # A thousand entries refer to the same bytes in the file.
        largest = max(new.filelist, key=lambda entry: entry.file_size)
        for number in range(1000):
            copy = zipfile.ZipInfo(f"archive/data/9{number}")
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(copy, name, getattr(largest, name))
            new.filelist.append(copy)
    with zipfile.ZipFile(files["outside"], "w") as new:
        for name, data in entries:
            new.writestr(f"../../{name}", data)
    return files
