"""WebDataset shards: the same samples as by the webdataset package, splits, labels; no URL or command is used."""

import json
import os

import braceexpand
import pytest
import webdataset
from grey_folders import GREY, fits
from stored_images import data_of, grey_files, png, write_shards, write_tar

from relvit.app.data import ReaderData
from relvit.app.data.archives.webdataset import Shards, expand_braces


def samples(count, **more):
    names = list(GREY)
    return [
        {"__key__": name.split(".")[0].replace("/", "_"), "png": content, "cls": names.index(label), **more}
        for name, content, label in grey_files(count)
    ]


def by_webdataset(files):
    return list(webdataset.WebDataset([str(file) for file in files], shardshuffle=False))


def test_samples_are_those_of_webdataset(tmp_path):
    """The names have folders and dots, several dots in the ending or capitals, and some files are not samples."""
    files = [
        ("__meta__/a.png", b"0"),
        ("a.b/000.PNG", b"1"),
        ("a.b/000.Cls", b"4"),
        ("000.left.png", b"3"),
        ("000.png", b"2"),
        ("000.cls", b" 5\n"),
        ("nodot", b"0"),
        ("x/001.jpeg", b"6"),
        ("x/001.cls", b"6"),
        ("x/002.png", b"8"),
        ("x/002.webp", b"7"),
        ("x/002.cls", b"7"),
    ]
    file = write_tar(tmp_path / "a.tar", files)
    expected = [
        (sample["__key__"], next(sample[e] for e in ("jpg", "jpeg", "webp", "png") if e in sample), sample["cls"])
        for sample in by_webdataset([file])
    ]
    assert [cls for _, _, cls in expected] == [b"4", b" 5\n", b"6", b"7"]
    found = Shards(str(tmp_path), "jpg; jpeg;.WEBP;png").find("a.tar", labelled=True)
    assert (
        [image.read() for image in found.images] == [content for _, content, _ in expected] == [b"1", b"2", b"6", b"7"]
    )
    keys = [image.name.rpartition("/") for image in found.images]
    assert [folder + slash + base.split(".")[0] for folder, slash, base in keys] == [key for key, _, _ in expected]
    assert found.labels == ["4", "5", "6", "7"]
    left = Shards(str(tmp_path), "left.png")
    with pytest.warns(
        UserWarning, match=r"a.tar has no part left.png for 3 of 4 samples, such as 'a.b/000', which has"
    ):
        assert [image.read() for image in left.find("a.tar", labelled=False).images] == [b"3"]


def test_shards_are_opened_as_they_are_named(tmp_path):
    """`..` after a symbolic link to a folder means the parent of the link's target."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "shards" / "link").symlink_to(tmp_path / "far" / "inner")
    for folder, content in (("shards", b"0"), ("far", b"1")):
        write_tar(tmp_path / folder / "a.tar", [("0.png", content), ("0.cls", b"0")])
    shards = Shards(str(tmp_path / "shards"))
    assert [image.read() for image in shards.find("link/../a.tar::a.tar", labelled=False).images] == [b"1", b"0"]
    with pytest.raises(ValueError, match=r"names '.*/shards/a.tar' more than once"):
        shards.find("a.tar::link/../../shards/a.tar", labelled=False)


def test_shards_of_shard_writer(tmp_path):
    write_shards(tmp_path / "s-%04d.tar", samples(5, json={"fine": "x", "k": 3, "none": None}), maxcount=4)
    data = data_of(name="wds/anything", root=str(tmp_path), train_split="s-{0000..0003}.tar|15")
    assert data.class_names == ["0", "1", "2"]
    assert sorted(fits(data.dataset("train")) + fits(data.dataset("val"))) == [0] * 5 + [1] * 5 + [2] * 5
    reference = by_webdataset(sorted(tmp_path.glob("*.tar")))
    images = Shards(str(tmp_path)).find("s-{0000..0003}.tar", labelled=True)
    assert [int(label) for label in images.labels] == [int(sample["cls"]) for sample in reference]
    assert [image.read() for image in images.images] == [sample["png"] for sample in reference]
    assert all(name.startswith("s-000") and name.endswith(".png") for name, _ in data.held_out())
    # Without root the name is the folder. The split does not depend on the order of the shards.
    part = ReaderData(f"wds/{tmp_path}", train_split="s-{0003..0001}.tar::s-0000.tar")
    assert sorted(part.held_out()) == sorted(data.held_out())
    assert (part.name, part.root) == ("wds/", str(tmp_path))
    again = part.init_args()
    with pytest.raises(ValueError, match=r"name is 'wds//.*' and root /.*, which are two folders; give root alone"):
        ReaderData(**again | {"name": f"wds/{tmp_path.parent}"})
    (tmp_path / "s-0000.tar").rename(tmp_path.parent / "s-0000.tar")
    moved = ReaderData(**again | {"root": str(tmp_path.parent), "train_split": "s-0000.tar", "val_split": "s-0000.tar"})
    assert len(moved.dataset("val")) == 4


def test_labels_in_json(tmp_path):
    made = samples(2)
    for i, sample in enumerate(made):
        sample["json"] = {"name": list(GREY)[sample.pop("cls")], "number": i % 2, "part": -1 if i else 4, "list": [1]}
    write_shards(tmp_path / "s-%d.tar", made)
    place = {"name": "wds/x", "root": str(tmp_path), "train_split": "s-0.tar", "val_split": "s-0.tar"}
    data = data_of(**place, target_key="name")
    assert (data.class_names, fits(data.dataset("val"))) == (["ant", "bee", "cat"], [0, 0, 1, 1, 2, 2])
    assert data_of(**place, target_key="number").dataset("val").targets == [0, 1] * 3
    with pytest.raises(
        ValueError, match=r"label .*s-0.tar/ant_000.json: no field 'nam' \(did you mean 'name'\?\); there"
    ):
        data_of(**place, target_key="nam")
    with pytest.raises(ValueError, match=r"ant_000.json: \[1\] is not a label: give the name"):
        data_of(**place, target_key="list")
    with pytest.raises(
        ValueError, match=r"no sample in .* has a part 'cls'; the first has 'json', 'png': --data.target_k"
    ):
        data_of(**place)
    write_tar(tmp_path / "s-1.tar", [("0.png", png(1)), ("0.json", b"{")])
    with pytest.raises(ValueError, match=r"cannot read the label .*s-1.tar/0.json: Expecting"):
        data_of(**place | {"train_split": "s-1.tar"}, target_key="name")


def test_info_names_splits_labels_and_numbers(tmp_path):
    """timm writes such a file. If a set of classes lacks the class of an image, the image's label in the set is -1."""
    made = [sample | {"json": {"few": [0, -1, 1][sample["cls"]]}} for sample in samples(3)]
    write_shards(tmp_path / "t-%d.tar", made, maxcount=5)
    write_shards(tmp_path / "v-%d.tar", samples(1))
    info = {
        "name": "x",
        "splits": {
            "train": {"name": "train", "num_samples": 9, "filenames": ["t-0.tar", "t-1.tar"], "shard_lengths": [5, 4]},
            "few": {"name": "few", "num_samples": 9, "filenames": ["t-0.tar", "t-1.tar"], "shard_lengths": [5, 4]},
            "validation": {"name": "validation", "num_samples": 3, "filenames": ["v-0.tar"], "shard_lengths": [3]},
        },
    }
    info["splits"]["few"]["alt_label"] = "few"
    place = {"name": "wds/x", "root": str(tmp_path), "val_split": "validation"}

    def write_info(**changes):
        info["splits"]["train"].update(changes)
        (tmp_path / "_info.json").write_text(json.dumps(info))

    write_info()
    data = data_of(**place)
    assert fits(data.dataset("train")) == [0] * 3 + [1] * 3 + [2] * 3
    assert fits(data.dataset("val")) == [0, 1, 2]
    few = data_of(**place, train_split="few")
    with pytest.warns(
        UserWarning, match=r"split 'few' of .* has no label for 3 of 9 images, such as .*t-0.tar/bee_000.png: left"
    ):
        assert fits(few.dataset("train"), ("ant", "cat")) == [0] * 3 + [1] * 3
    with pytest.raises(
        ValueError, match=r"no split 'trian' .*\(did you mean 'train'\?\): _info.json has 'few', 'train'"
    ):
        data_of(**place, train_split="trian")
    for lengths, total in (([5, 5], 0), ([5, 5], 9), ([5, 4], 10)):
        write_info(shard_lengths=lengths, num_samples=total)
        message = "train has 9 samples with images in .*, num_samples or shard_lengths of the split asks for 10: copy"
        with pytest.raises(ValueError, match=message):
            data_of(**place)
    write_info(shard_lengths=[9], num_samples=9)
    with pytest.raises(ValueError, match=r"train by 'filenames' .*2 filenames and 1 shard_lengths"):
        data_of(**place)
    write_info(filenames=None)
    with pytest.raises(ValueError, match=r"_info.json should describe .*train by 'filenames' and 'num_samples'"):
        data_of(**place)
    (tmp_path / "_info.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"_info.json is not a description of shards in timm's format"):
        data_of(**place)


def test_samples_left_out_for_their_ending_explain_a_number_too_small(tmp_path):
    write_tar(tmp_path / "a.tar", [(f"{i}.{'tif' if i == 3 else 'png'}", png(1)) for i in range(4)])
    message = r"3 samples with .*: left out are 1 without a part png or jpg: .*, too \(--data.input_key\), or correct"
    with pytest.warns(UserWarning, match="which has 'tif'"), pytest.raises(ValueError, match=message):
        Shards(str(tmp_path), "png;jpg").find("a.tar|4", labelled=False)
    assert len(Shards(str(tmp_path), "png;jpg;tif").find("a.tar|4", labelled=False).images) == 4


def test_braces():
    for pattern in ("a.tar", "a-{000..012}.tar", "a-{8..11}", "a-{08..11}", "{1..2}-{a,b}.tar", "{3..1}", "{a,,b}c"):
        assert expand_braces(pattern) == list(braceexpand.braceexpand(pattern))
    for pattern in ("a{0..3", "a}", "a{b,{c,d}}", "a{0...3}", "a{b}", "}{"):
        with pytest.raises(ValueError, match=r"allowed are '\{000\.\.127\}' and '\{a,b\}'"):
            expand_braces(pattern)


MISTAKES = {
    "train": r"no split 'train' in .*: there is no _info.json; or name the shards, .* \(there are 's-0.tar', 's-1.t",
    "s-{0..9}.tar": r"no archive at .*s-2.tar; correct the name as given or in _info.json, or copy",
    "z.tar": r"z.tar is a folder, not an archive; correct the name",
    "s-{0,1}.tar::./s-1.tar": r"names '/.*/s-1.tar' more than once; name each shard once",
    "s-0.tar|many": r"should name a number of samples behind '\|', such as 'a-{0..9}.tar\|1000'",
    "s-{0,1}.tar|99": r"s-\{0,1\}.tar\|99 has 6 samples with images in .*, the text behind '\|' asks for 99: copy",
    "twice.tar": r"twice.tar holds a.png and a.PNG, which are the same part of one sample; write",
    "text.tar": r"text.tar has no part jpg or .* for 1 of 1 sample, such as 'a', which has 'txt'; give the endi",
    "t.tar": r"no samples in .*t.tar; a sample is files such as '000.jpg' and '000.cls'",
}


def test_mistakes(tmp_path):
    write_shards(tmp_path / "s-%d.tar", samples(2), maxcount=4)
    write_tar(tmp_path / "twice.tar", [("a.png", png(1)), ("a.cls", b"1"), ("a.PNG", png(1))])
    write_tar(tmp_path / "text.tar", [("a.txt", b"1")])
    write_tar(tmp_path / "t.tar", [("README", b"1")])
    (tmp_path / "z.tar").mkdir()
    for split, message in MISTAKES.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            ReaderData("wds/x", str(tmp_path), train_split=split)


@pytest.mark.parametrize("url", ["pipe:touch ran; cat x.tar", "https://host/a.tar", "s3://b/a.tar"])
def test_no_url_is_opened_and_no_command_runs(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "_info.json").write_text(json.dumps({"splits": {"train": {"filenames": [url]}}}))
    for arguments in (
        {"name": "wds/x", "root": ".", "train_split": url},
        {"name": "wds/x", "root": url},
        {"name": f"wds/{url}"},
        {"name": "wds/x", "root": "."},
    ):
        with pytest.raises(ValueError, match="is not on disk; download the archives first, no URL is opened and no co"):
            ReaderData(**arguments)
    assert os.listdir(tmp_path) == ["_info.json"]
