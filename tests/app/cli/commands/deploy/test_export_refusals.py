"""What `relvit export` refuses, and a file that it does not keep."""

import sys

import pytest
from torch._inductor.exc import InvalidCxxCompiler

import relvit
from relvit.app.evaluation import ExportError, export_model
from relvit.app.evaluation.deploy import onnx_and_pt2 as module


def test_a_file_that_computes_something_else_is_not_kept(best, tmp_path, monkeypatch):
    """An older file of the same name stays unchanged."""

    def wrong(net, images, dynamic, output, description):
        output.touch()
        return lambda images: net(images) + 0.01 * (len(images) == 1)

    (tmp_path / "model.pt2").write_bytes(b"before")

    monkeypatch.setattr(module, "_program", wrong)
    with pytest.raises(
        ExportError, match=r"for images \(1, 3, 16, 16\) the exported model's outputs differ from the model"
    ):
        export_model(relvit.load(best), tmp_path / "model.pt2")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def raise_no_compiler():
    raise InvalidCxxCompiler


@pytest.fixture
def refused(best, tmp_path, fails):
    """Return a function that exports to a name in the folder of the test with options, and returns the error."""
    return lambda name, *options: fails(["export", best, f"--output={tmp_path / name}", *options])


def test_an_output_that_cannot_be_written_is_refused_and_leaves_no_folder(refused, tmp_path):
    assert "ends in '.onxx'; allowed are .onnx, .pt2 (did you mean '.onnx'?)" in refused("model.onxx")
    (tmp_path / "file").touch()
    assert "file, which is not a folder" in refused("file/more/model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.pt2", ["--int8"], "int8 is for files that end in .onnx, got "),
        ("model.onnx", ["--aot"], "aot is for files that end in .pt2, got "),
        ("model.onnx", ["--calibration", "."], "files that end in .onnx: add int8, or leave calibration out"),
        ("model.pt2", ["--calibration", "."], "files that end in .onnx: leave calibration out"),
        (
            "model.onnx",
            ["--data=DigitsData", "--data.batch_size=4"],
            "accuracy of --int8 is measured: leave --data out",
        ),
        ("model.onnx", ["--int8", "--calibration", "."], "no image below"),
        ("model.onnx", ["--int8", "--calibration", "nowhere"], "no file or folder 'nowhere'"),
    ],
)
def test_options_that_do_not_fit_the_file_or_its_images_are_refused(
    name, options, message, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert message in refused(name, *options)


def test_a_missing_compiler_is_named(refused, monkeypatch):
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", raise_no_compiler)
    assert "aot needs a C++ compiler, and there is none" in refused("model.pt2", "--aot")


def test_a_missing_package_is_named_with_its_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert 'ONNX needs the package onnxscript: pip install "relvit[onnx]"' in refused("model.onnx")
