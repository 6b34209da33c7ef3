"""ImageListData: paths, labels, splits, and errors that give the line in the list."""

import re
import sys

import pytest
import torch
from grey_folders import AS_STORED, GREY, data_of, fits, make
from stored_images import png

from relvit.app.data import ImageListData
from relvit.app.data.images import file_datasets
from relvit.app.data.inspect import check_data
from relvit.app.data.modules import image_list
from relvit.app.data.modules.image_list import read_list


def rows_of(split, counts):
    return [(f"{split}/{name}/{i:03d}.png", name) for name, count in counts.items() for i in range(count)]


def write(path, rows, header="path,label", separator=","):
    path.write_text("\n".join([header.replace(",", separator), *(separator.join(row) for row in rows)]) + "\n")
    return str(path)


@pytest.fixture
def root(tmp_path):
    make(tmp_path, train=10, test=3)
    return tmp_path


def test_paths_start_from_the_lists_folder_or_from_root(root, tmp_path_factory):
    rows = rows_of("train", {"cat": 10, "ant": 3, "bee": 5})
    inside = ImageListData(write(root / "train.csv", rows), **AS_STORED)
    assert inside.class_names == ["ant", "bee", "cat"]
    elsewhere = write(tmp_path_factory.mktemp("lists") / "train.csv", rows)
    outside = ImageListData(elsewhere, root=str(root), **AS_STORED)
    absolute = ImageListData(write(root / "abs.csv", [(f"{root}/{path}", label) for path, label in rows]), **AS_STORED)
    for data in (inside, outside, absolute):
        assert sorted(fits(data.dataset("train")) + fits(data.dataset("val"))) == [0] * 3 + [1] * 5 + [2] * 10
    message = r"18 wrong rows: line 2: no file .*lists.*; and 13 more; paths start from .*lists.*: .* \(--data.root\)"
    with pytest.raises(ValueError, match=message):
        ImageListData(elsewhere, **AS_STORED).dataset("train")


def test_the_automatic_split_is_stratified_and_goes_by_the_written_paths(root, tmp_path_factory):
    rows = rows_of("train", dict.fromkeys(GREY, 10))
    data = ImageListData(write(root / "train.csv", rows), val_fraction=0.3, **AS_STORED)
    held_out = data.held_out()
    assert [label for _, label in held_out] == [0] * 3 + [1] * 3 + [2] * 3
    assert set(held_out) <= {(path, ["ant", "bee", "cat"].index(label)) for path, label in rows}
    other = ImageListData(
        write(tmp_path_factory.mktemp("lists") / "x.csv", rows[::-1]), root=str(root), val_fraction=0.3, **AS_STORED
    )
    assert sorted(other.held_out()) == sorted(held_out)
    assert sorted(ImageListData(data.train, val_fraction=0.3, split_seed=1, **AS_STORED).held_out()) != sorted(held_out)
    # The list of val images that a run writes can be the argument for val.
    again = write(root / "val.csv", [(path, data.class_names[label]) for path, label in held_out])
    assert [*ImageListData(data.train, again, **AS_STORED).dataset("val").samples] == [*data.dataset("val").samples]


def test_val_and_test_lists(root):
    train = write(root / "train.csv", rows_of("train", dict.fromkeys(GREY, 4)))
    data = ImageListData(
        train,
        val=write(root / "val.tsv", rows_of("test", {"bee": 2}), separator="\t"),
        test=write(root / "test.csv", [(*row, "x") for row in rows_of("test", {"cat": 3})], header="path,label,note"),
        **AS_STORED,
    )
    assert (len(data.dataset("train")), data.held_out()) == (12, [])
    assert fits(data.dataset("val")) == [1, 1]
    assert fits(data.dataset("test")) == [2, 2, 2]
    assert [path for _, path in data.dataset("predict")] == [f"{root}/test/cat/00{i}.png" for i in range(3)]


def test_numbers_as_labels(root):
    number = {"ant": "10", "bee": "9", "cat": "2"}
    rows = [(path, number[label]) for path, label in rows_of("train", dict.fromkeys(GREY, 2))]
    data = ImageListData(write(root / "train.csv", rows), **AS_STORED)
    assert data.class_names == ["2", "9", "10"]
    fits(data.dataset("train"), ("cat", "bee", "ant"))
    # These labels are numbers, the positions in `class_names`.
    number = {"ant": "2", "bee": "0", "cat": "1"}
    rows = [(path, number[label]) for path, label in rows_of("train", dict.fromkeys(GREY, 2))]
    data = ImageListData(write(root / "train.csv", rows), class_names=["bee", "cat", "ant"], **AS_STORED)
    fits(data.dataset("train"), ("bee", "cat", "ant"))


def test_parquet(root, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    paths, labels = zip(*rows_of("train", dict.fromkeys(GREY, 4)), strict=True)
    file = str(root / "train.parquet")
    parquet.write_table(pa.table({"width": [4] * 12, "label": list(labels), "path": list(paths)}), file)
    data = ImageListData(file, **AS_STORED)
    assert sorted(fits(data.dataset("train")) + fits(data.dataset("val"))) == [0] * 4 + [1] * 4 + [2] * 4
    numbers = [list(GREY).index(label) for label in labels]
    parquet.write_table(pa.table({"label": numbers, "path": list(paths)}), file)
    assert ImageListData(file, **AS_STORED).class_names == ["0", "1", "2"]
    parquet.write_table(pa.table({"label": ["ant", None], "path": list(paths[:2])}), file)
    with pytest.raises(ValueError, match=r"1 wrong row: line 2: no label for train/ant/001.png"):
        ImageListData(file)
    # pandas writes whole numbers as floating point if one of them is missing.
    parquet.write_table(pa.table({"label": [1.0, float("nan")], "path": list(paths[:2])}), file)
    with pytest.raises(ValueError, match=r"1 wrong row: line 2: no label for train/ant/001.png"):
        ImageListData(file)
    for column, other in (("label", ["ant", "bee"]), ("label", {"name": "ant"}), ("label", b"ant"), ("path", b"x.png")):
        parquet.write_table(pa.table({"label": ["ant"], "path": ["x.png"]} | {column: [other]}), file)
        with pytest.raises(ValueError, match=rf"line 1: {re.escape(repr(other))} is neither text nor a number: write"):
            ImageListData(file, label_separator=",")
    for content in (b"PAR1", b"PAR1" * 9, b"path,label"):
        (root / "broken.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read .*/broken.parquet as a Parquet file: .*; write it anew"):
            ImageListData(str(root / "broken.parquet"))
    parquet.write_table(pa.table([pa.array(["x"])] * 3, names=["path", "label", "label"]), file)
    with pytest.raises(ValueError, match="has 2 columns 'label': keep one"):
        ImageListData(file)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "relvit\[parquet\]"'):
        ImageListData(str(root / "train.parquet"))


def test_predict_takes_a_list_without_labels_or_a_folder(root):
    names = list(GREY)
    data = ImageListData(predict=str(root / "test"), class_names=names, **AS_STORED)
    assert len(data.dataset("predict")) == 9
    file = write(root / "p.csv", [("test/bee/001.png",)], header="path")
    data = ImageListData(predict=file, class_names=names, **AS_STORED)
    assert [path for _, path in data.dataset("predict")] == [f"{root}/test/bee/001.png"]
    with pytest.raises(ValueError, match="no list to predict"):
        ImageListData(class_names=names).dataset("predict")


def test_absent_files_may_be_skipped(root):
    rows = [*rows_of("train", dict.fromkeys(GREY, 4)), ("train/cat/gone.png", "cat")]
    train = write(root / "train.csv", rows)
    with pytest.raises(ValueError, match=r"train.csv has 1 wrong row: line 14: no file .*train/cat/gone\.png"):
        ImageListData(train, **AS_STORED).dataset("train")
    data = ImageListData(train, train, on_error="skip", **AS_STORED)
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 12
    assert data.unreadable["val"] == {f"{root}/train/cat/gone.png": "there is no such file"}


WRONG_LISTS = [
    ("file,label\na,b\n", r"no column 'path'.*; its columns, named in the first line, are 'file', 'label'"),
    ("path;label\nx.png;a\n", r"no column 'path' \(its cells are separated by ';': a .csv file needs commas"),
    ("path,labels\na,b\n", r"no column 'label' \(rename 'labels'\?\)"),
    ("", "no column 'path'"),
    ("path,label\n", "lists no image"),
    (
        "path,label\nx.png,a\n,b\ny.png,\nz.png\n",
        r"3 wrong rows: line 3: no path; line 4: no label for y.png; line 5.*; only lists .* --data\.label_separator",
    ),
    ('path,label\nx.png,a\n"y\n.png",a\nx.png,b\n', r"1 wrong row: line 5: x.png is already in line 2"),
    ("path,label\nx.png,a\n./x.png,b\n", r"1 wrong row: line 3: ./x.png is already in line 2"),
    ('path,label,note\na,b,"x\nc,b,y\n', r"broken at line 3 \(unexpected end of data\): look there and above for a q"),
    ('path,label,note\na,b,"x\nc,b,"y"\n', r"broken at line 3 \(',' expected after '\"'\): look .* not doubled"),
    (
        "path,label\nw.png,Washington\nx.png,Washington, D.C.\n",
        r"1 wrong row: line 3: 3 cells \('x.png', 'Washington', 'D.C.'\) for 2 columns \('path', 'label'\): write a "
        r"cell that holds a comma in quotes, such as \"one,two\"$",
    ),
    ("label,path\nWashington, D.C.,x.png\n", r"line 2: 3 cells \('Washington', 'D.C.', 'x.png'\) for 2 columns"),
    ("path\nWashington, D.C.\n", r"has no column 'label'"),
    ("path,label,label\nx.png,a,b\n", r"has 2 columns 'label': keep one; its columns are 'path', 'label', 'label'$"),
    ("path, label ,path\nx.png,a,b\n", r"has 2 columns 'path': keep one"),
    (
        "path\tlabel\nx.png\tant\tbee\n",
        r"line 2: 3 cells .* for 2 columns .*: write a cell that holds a tab in",
    ),
]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_lists_in_another_encoding_are_named(tmp_path, encoding):
    file = tmp_path / "list.csv"
    file.write_text("path,label\nx.png,ant\n", encoding=encoding)
    with pytest.raises(ValueError, match=r"list.csv is not in UTF-8, but in UTF-16 or another encoding: save it"):
        ImageListData(str(file))


def test_a_list_in_latin_1_is_named(tmp_path):
    file, cure = tmp_path / "list.csv", "; the list is not in UTF-8: save it as CSV in UTF-8$"
    for name in ("müller.png", "x.png"):
        (tmp_path / name).write_bytes(png(1))
    # The file name is repeated, and the error must not blame the encoding instead.
    file.write_text("path,label\nmüller.png,ant\nmüller.png,ant\n", encoding="latin-1")
    with pytest.raises(ValueError, match=r"line 3: m\\xfcller.png is already in line 2$"):
        ImageListData(str(file))
    for row, fault in ("müller.png,ant", r"no file .*\\xfcller.png"), ("x.png,béé", "unknown class .*"):
        file.write_text(f"path,label\n{row}\n", encoding="latin-1")
        with pytest.raises(ValueError, match=f"line 2: {fault}{cure}"):
            ImageListData(None, str(file), class_names=["ant", "béé"]).dataset("val")
        file.write_text(f"path,label\n{row}\n", encoding="utf-8")
        assert len(ImageListData(None, str(file), class_names=["ant", "béé"]).dataset("val")) == 1


@pytest.mark.parametrize(("text", "message"), WRONG_LISTS, ids=range(len(WRONG_LISTS)))
def test_wrong_lists(tmp_path, text, message):
    file = tmp_path / ("list.tsv" if "\t" in text else "list.csv")
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        ImageListData(str(file))


HONEST_LISTS = [
    ('path,label\nx.png,"Washington, D.C."\n"a, b.png",cat\n', [("x.png", "Washington, D.C."), ("a, b.png", "cat")]),
    ("label,path\ncat,x.png\n", [("x.png", "cat")]),
    ('path, label\nx.png, "Washington, D.C."\n', [("x.png", "Washington, D.C.")]),
    (
        'path     , label\n"a, b.png" , "5"" nail" \nx.png    , cat\n" y.png", "dog"  ',
        [("a, b.png", '5" nail'), ("x.png", "cat"), ("y.png", "dog")],
    ),
    (
        'note,path,label\n"" ,x.png,"cat" \nq, y.png , "dog"\n"5"" " ,z.png,ant\n',
        [("x.png", "cat"), ("y.png", "dog"), ("z.png", "ant")],
    ),
    # Two quotes in a cell stand for one quote, also at its ends.
    ('path,label,note\nx.png,"5"""  ,q\ny.png, """, dog""" ,"a "" ,b"\n', [("x.png", '5"'), ("y.png", '", dog"')]),
    ('path,label,note\nx.png,cat, "" \ny.png,dog,""  \r\n', [("x.png", "cat"), ("y.png", "dog")]),
    # Columns that are not used may have equal names or none, and empty cells may follow the last column.
    ("path,label,note,note,,\nx.png,cat,1,2,,\n", [("x.png", "cat")]),
    ("path,label\nx.png,cat,,\n", [("x.png", "cat")]),
    ("label,label,path\ncat,dog,x.png\n", [("x.png", "")]),
    # Spreadsheets write a byte order mark before the first column's name, and end lines with CR LF.
    ("\ufeffpath, label\r\nx.png, ant\r\n\r\ny.png, bee\r\n", [("x.png", "ant"), ("y.png", "bee")]),
]


@pytest.mark.parametrize(("text", "rows"), HONEST_LISTS, ids=range(len(HONEST_LISTS)))
def test_honest_lists(tmp_path, text, rows):
    (tmp_path / "list.csv").write_bytes(text.encode())
    labels = "none" if rows[0][1] == "" else "needed"
    assert [row[1:] for row in read_list(str(tmp_path / "list.csv"), labels)] == rows


def test_one_image_under_two_spellings(root, tmp_path_factory):
    rows = [*rows_of("train", {"ant": 2, "bee": 2}), (f"{root}/train/ant/000.png", "ant")]
    elsewhere = tmp_path_factory.mktemp("lists") / "train.csv"
    for file, options in ((root / "train.csv", {}), (elsewhere, {"root": str(root)})):
        with pytest.raises(ValueError, match=r"1 wrong row: line 6: .*000\.png is already in line 2, as train/ant/000"):
            ImageListData(write(file, rows), **options, **AS_STORED)


def test_paths_are_opened_as_they_are_written(root, monkeypatch):
    """`..` after a symbolic link to a folder means the parent of the link's target."""
    (root / "near").mkdir()
    (root / "near" / "link").symlink_to(root / "train")
    monkeypatch.chdir(root / "near")
    write(root / "list.csv", rows_of("train", dict.fromkeys(GREY, 4)))
    data = ImageListData("link/../list.csv", root="link/..", **AS_STORED)
    assert (data.train, data.root) == (f"{root}/list.csv", str(root))
    assert len(data.samples("train") + data.samples("val")) == 12
    assert data_of("link/..", class_names=list(GREY)).root == str(root)


def test_images_of_train_in_val_or_test(root, recwarn):
    rows = rows_of("train", dict.fromkeys(GREY, 4))
    train = write(root / "train.csv", rows)
    again = [(f"{root}/{path}", label) for path, label in rows[2:7]]
    val = write(root / "val.csv", again + rows_of("test", {"bee": 1}))
    test = write(root / "test.csv", rows_of("test", {"cat": 3}) + rows[:1])
    ImageListData(train, val, test, **AS_STORED).setup("fit")
    texts = [str(warning.message) for warning in recwarn]
    assert texts == [
        "5 images of val are also images of train: 'train/ant/002.png', 'train/ant/003.png', 'train/bee/000.png' and 2 "
        "more; the accuracy on them says nothing about new images",
        "1 image of test is also an image of train: 'train/ant/000.png'; the accuracy on it says nothing about new "
        "images",
    ]
    recwarn.clear()
    # A list without training images, or with images that are held out, causes no warning.
    own = write(root / "val.csv", rows_of("test", {"bee": 2}))
    ImageListData(train, own, own, **AS_STORED).setup("fit")
    ImageListData(train, test=own, **AS_STORED).setup("fit")
    assert not [str(warning.message) for warning in recwarn]


def test_wrong_arguments(root):
    train = write(root / "train.csv", rows_of("train", dict.fromkeys(GREY, 4)))
    with pytest.raises(FileNotFoundError, match=r"no list at .*none\.csv"):
        ImageListData(str(root / "none.csv"))
    with pytest.raises(FileNotFoundError, match=r"train is a folder; give a CSV, TSV or Parquet file"):
        ImageListData(str(root / "train"))
    (root / "a.txt").touch()
    with pytest.raises(ValueError, match=r"ends in '.txt'; lists end in '.csv', '.tsv' or '.parquet'"):
        ImageListData(str(root / "a.txt"))
    with pytest.raises(ValueError, match=r"no train list; give one \(--data.train\)"):
        ImageListData()
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        ImageListData(train, root=str(root / "nowhere"))
    with pytest.raises(ValueError, match=r"no test list; give one \(--data.test\)"):
        ImageListData(train).dataset("test")
    test = write(root / "test.csv", [("test/cat/000.png", "cat"), ("test/cat/001.png", "cats")])
    with pytest.raises(ValueError, match=r"line 3: unknown class 'cats' \(did you mean 'cat'\?\)"):
        ImageListData(train, test=test).dataset("test")
    # A training also fails with this error before it starts.
    with pytest.raises(ValueError, match="line 3: unknown class 'cats'"):
        ImageListData(train, test=test).setup("fit")
    with pytest.raises(ValueError, match="has no image of the classes 'dog' of class_names"):
        ImageListData(train, class_names=[*GREY, "dog"]).dataset("train")


SEVERAL = ["ant;bee", "", "bee", "cat ; ant;", "cat", "bee;ant;bee"]


def several(root, labels, name="train.csv", **options):
    """Write a list of images with several labels each."""
    rows = [(f"train/ant/{i:03d}.png", label) for i, label in enumerate(labels)]
    return ImageListData(write(root / name, rows), label_separator=";", **AS_STORED | options)


def test_several_labels(root):
    data = several(root, SEVERAL, test=write(root / "test.csv", [("test/cat/000.png", "1; 2")]), val_fraction=0.4)
    assert (data.class_names, data.multi_label) == (["ant", "bee", "cat"], True)
    positions = [(0, 1), (), (1,), (0, 2), (2,), (0, 1)]
    samples = data.samples("train") + data.samples("val")
    assert sorted(samples) == [(f"{root}/train/ant/{i:03d}.png", label) for i, label in enumerate(positions)]
    _, labels = next(iter(data._loader("val")))
    hot = [[float(c in label) for c in range(3)] for _, label in data.samples("val")]
    assert labels.dtype == torch.bool
    assert labels.float().tolist() == hot
    # Labels may be numbers if all labels of the list are numbers.
    assert data.samples("test") == [(f"{root}/test/cat/000.png", (1, 2))]
    assert type(data)(**data.init_args()).samples("train") == data.samples("train")
    report = check_data(data, processes=1)
    assert report["splits"]["train"]["images"] + report["splits"]["val"]["images"] == 6
    counts = [report["splits"][split]["classes"] for split in ("train", "val")]
    assert {name: sum(count[name] for count in counts) for name in data.class_names} == {"ant": 3, "bee": 3, "cat": 2}


def test_the_automatic_split_goes_by_the_rarest_label(root):
    labels = ["ant"] * 3 + ["ant;bee"] * 4 + ["ant;bee;cat"] * 2 + [""]
    data = several(root, labels, val_fraction=0.25)
    assert sorted(label for _, label in data.held_out()) == [(0,), (0, 1), (0, 1, 2)]


@pytest.mark.parametrize("size", [(4, 6), 8], ids=["same size", "any size"])
def test_several_labels_in_memory(root, size):
    plain, cached = (several(root, SEVERAL, img_size=size, cache=cache, val_fraction=0.4) for cache in (False, True))
    cached.dataset("train")
    for ours, theirs in zip(cached._loader("val"), plain._loader("val"), strict=True):
        assert torch.equal(ours[1], theirs[1])
        torch.testing.assert_close(ours[0], theirs[0])


def test_targets_of_several_labels_are_made_image_by_image(root, monkeypatch):
    """For a million images of 20,000 classes, all targets together take 20 GB."""
    made, make_target = [], file_datasets.target_of
    monkeypatch.setattr(file_datasets, "target_of", lambda *given: (made.append(given), make_target(*given))[1])
    dataset = several(root, SEVERAL, val_fraction=0.4).dataset("train")
    assert dataset[0][1].tolist() == dataset.targets[0].tolist()
    assert len(made) == 1 + len(dataset)


def test_near_names_are_searched_for_the_shown_rows_alone(root, monkeypatch):
    searched = []
    monkeypatch.setattr(image_list, "did_you_mean", lambda name, known: searched.append(name) or "")
    data = several(root, ["ant", *["cta"] * 9], class_names=list(GREY))
    with pytest.raises(ValueError, match=r"9 wrong rows: line 3: unknown class 'cta'; .*; and 4 more"):
        data.dataset("train")
    assert len(searched) == 5


def test_wrong_labels_among_several(root):
    data = several(root, ["ant", "bees ;ant;x", "cta"], class_names=list(GREY))
    message = r"2 wrong rows: line 3: unknown classes 'bees' \(did you mean 'bee'\?\), 'x'; line 4: unknown class 'cta'"
    with pytest.raises(ValueError, match=message):
        data.dataset("train")
    for separator, asked in ((None, ";"), ("|", ";"), (";", None)):
        train = several(root, ["ant", "ant;bee", "cat"]).train
        data = ImageListData(train, class_names=["ant", "bee"], label_separator=separator, **AS_STORED)
        hint = f"; for several labels per image give --data.label_separator '{asked}'" if asked else ""
        with pytest.raises(ValueError, match=f"line 4: unknown class 'cat'{hint}$"):
            data.dataset("train")
    with pytest.raises(ValueError, match="can be held out to validate: each is the only one of its class"):
        several(root, ["ant", "bee;ant"], class_names=["ant", "bee"]).dataset("train")
    with pytest.raises(ValueError, match="has no image of the classes 'bee' of class_names"):
        several(root, ["ant;cat"], class_names=list(GREY)).dataset("train")
    with pytest.raises(ValueError, match="two or more classes, got \\[\\]"):
        several(root, ["", ";"])
    with pytest.raises(
        ValueError, match="balance 'loss' is for images of one label each: leave out balance or label_separator"
    ):
        several(root, SEVERAL, balance="loss")
    with pytest.raises(ValueError, match="label_separator is empty"):
        ImageListData(str(root / "train.csv"), label_separator="")
    with pytest.raises(ValueError, match=r"line 3: no label for train/ant/001.png"):
        ImageListData(several(root, SEVERAL).train, **AS_STORED)


@pytest.mark.parametrize(("label", "separator"), [("ant;bee", ";"), ("ant|bee", "|"), ("ant,bee", ","), ("ant", None)])
@pytest.mark.parametrize("given", [None, ":"], ids=["one label", "a separator that no label has"])
def test_labels_that_look_like_several(given, label, separator, root, recwarn):
    rows = [*rows_of("train", {"ant": 3, "bee": 3})[1:], ("train/ant/000.png", label)]
    train = write(root / "train.csv", [(path, f'"{name}"') for path, name in rows])
    ImageListData(train, label_separator=given, **AS_STORED).dataset("train")
    texts = [str(warning.message) for warning in recwarn]
    wanted = f"'{label}' is one class: for several labels per image give --data.label_separator '{separator}'"
    assert texts == ([] if separator is None else [wanted])


def test_one_warning_names_all_labels_that_look_like_several(root):
    train = write(root / "train.csv", [("train/ant/000.png", "ant;bee"), ("train/ant/001.png", "bee;cat")])
    data = ImageListData(train, **AS_STORED | {"val": train})
    with pytest.warns(UserWarning, match="'ant;bee', 'bee;cat' are one class each: for several labels per image"):
        data.dataset("train")
