"""The benchmark: ratios worked out by hand, the counting of memory, what is written, and what is refused."""

import json

import pytest
import torch
from PIL import Image
from scripts import ROOT, load

benchmark, report = load("benchmark"), load("benchmark_report")


def row(name, seconds, memory=None, status="ok", **other):
    shared = {"run": "2026-01-02T03:04:05Z", "level": "model", "size": 224, "mode": "train", "batch": 6, "seed": 0}
    place = {"device": "cpu", "dtype": "float32", "compiled": False, "rounds": 3, "cap": 60.0, "commit": "abc"}
    machine = {"processor": "P", "cores": 2, "threads": 1, "gpu": None}
    found = {"name": name, "seconds": seconds, "memory_bytes": memory, "status": status}
    return {**shared, **place, **found, "versions": {"torch": "2"}, "machine": machine, **other}


def rows():
    return [
        row("plain", [0.1, 0.2, 0.4], 2 * 2**20),
        row("control", [0.11, 0.2, 0.2], 2 * 2**20),
        row("relvit_small", [0.3, 0.3, 0.4], 5 * 2**20),
        row("rope", [], None, "out of memory"),
    ]


def measure(tmp_path, *arguments):
    """Run a tiny layer benchmark; returns the rows it appended."""
    output = tmp_path / "new" / "results.jsonl"
    benchmark.main(["--level=layer", "--size=64", "--batch=1", "--device=cpu", f"--output={output}", *arguments])
    return report.read(output)


def test_ratios_pair_the_rounds():
    plain, control, ours, failed = rows()
    # Per round 3, 1.5, 1.
    assert report.time_ratio(ours, plain) == pytest.approx(1.5)
    # Per round 1.1, 1, 0.5.
    assert report.time_ratio(control, plain) == pytest.approx(1.0)
    # Per round 9, 1, 1: median 1, while the medians 0.3 and 0.1 would give 3.
    assert report.time_ratio(row("a", [0.9, 0.3, 0.1]), row("plain", [0.1, 0.3, 0.1])) == pytest.approx(1.0)
    assert report.memory_ratio(ours, plain) == 2.5
    assert report.time_ratio(failed, plain) is None
    assert report.time_ratio(ours, None) is None
    assert report.memory_ratio(failed, plain) is None
    assert report.memory_ratio(ours, row("plain", [1.0], 0)) is None


def test_samples_of_other_rounds_are_refused():
    with pytest.raises(ValueError, match=r"2 samples of 'rope', 3 of 'plain' in run 2026-01-02"):
        report.time_ratio(row("rope", [0.1, 0.1]), rows()[0])


def test_table():
    text = report.render(rows())
    assert "Run 2026-01-02T03:04:05Z, 3 rounds, commit abc; P, 2 cores, 1 threads; torch 2." in text
    assert "| `plain` | 200.00 | 30.0 | 1.00 | 2.0 | 1.00 |" in text
    assert "| `relvit_small` | 300.00 | 20.0 | 1.50 | 5.0 | 2.50 |" in text
    assert "| `rope` | out of memory | – | – | – | – |" in text
    assert "Noise: `control` took 1.000 times as long as `plain`." in text
    assert report.render(rows()) == text


def test_tables_do_not_mix_runs_sizes_and_modes():
    slow = [row("plain", [9.0] * 3, 0, run="later", mode="forward"), row("rope", [18.0] * 3, 0, run="later")]
    text = report.render([*rows(), *slow, row("control", [1.0] * 3, size=384)])
    assert text.count("\n### ") == 4
    assert "| `plain` | 9000.00 | 0.7 | 1.00 |\n" in text  # and no columns for memory, which is zero
    assert "| `rope` | 18000.00 | 0.3 | – |\n" in text  # its plain is of another mode
    assert "| `control` | 1000.00 | 6.0 | – |\n" in text


def test_figure_has_a_bar_per_competitor():
    time, memory, larger = report.draw(rows()).axes
    # Without control, which is noise, and without rope, which has no figure.
    assert [bar.get_width() for bar in time.patches] == pytest.approx([1.5])
    assert [label.get_text() for label in time.get_yticklabels()] == ["relvit_small"]
    assert time.get_title("left") == "relvit_small trains in 1.50 times\nthe time of a plain ViT-S"
    assert [bar.get_width() for bar in memory.patches] == pytest.approx([2.5])
    assert larger.lines[0].get_ydata() == pytest.approx([1.5])


def test_figure_has_lines_over_the_patches():
    def layers(size, plain, tiled, reference, **other):
        found = {"plain": (plain, 10), "relvit_tiled": (tiled, 15), "relvit_reference": (reference, 3000)}
        return [
            row(name, [seconds] * 3, memory, level="layer", size=size, **other)
            for name, (seconds, memory) in found.items()
        ]

    measured = [
        *layers(448, 0.1, 0.3, 1.0),
        # A later run of the same, which counts; another mode and another device, which do not.
        *layers(448, 0.1, 0.2, 1.2, run="later"),
        *layers(448, 0.1, 0.9, 0.9, mode="forward"),
        *layers(448, 0.1, 0.9, 0.9, device="cuda"),
        *layers(224, 0.1, 0.1, 0.4),
        *layers(1024, 0.1, 0.2, 9.0)[:2],
    ]
    time, memory = report.draw(measured).axes
    ours, theirs = time.lines[:2]
    assert list(ours.get_xdata()) == [196, 784, 4096]
    assert ours.get_ydata() == pytest.approx([1, 2, 2])
    assert list(theirs.get_xdata()) == [196, 784]
    assert theirs.get_ydata() == pytest.approx([4, 12])
    # At the largest size that both have.
    assert time.get_title("left") == "A layer: 6 times faster than the\npaper's algorithm, 784 patches"
    assert memory.get_title("left") == "A layer: 1/200 of its memory\nfor backward, 784 patches"
    assert [text.get_text() for text in time.get_legend().get_texts()] == ["relvit", "the paper's algorithm"]


def test_committed_figure_has_six_panels_and_overlaps_nothing():
    figure = report.draw(report.read(ROOT / "docs" / "benchmarks" / "results.jsonl"))
    figure.canvas.draw()
    assert len(figure.axes) == 6
    for axes in figure.axes:
        data = axes.get_window_extent()
        if (legend := axes.get_legend()) is not None:
            assert not data.overlaps(legend.get_window_extent())
        assert figure.bbox.x1 > axes._left_title.get_window_extent().x1
        assert axes.get_xlabel()
    assert (ROOT / "docs" / "benchmarks" / "results.png").stat().st_size < 500_000


def test_committed_tables_are_those_of_the_committed_samples():
    folder = ROOT / "docs" / "benchmarks"
    assert (folder / "results.md").read_text() == report.render(report.read(folder / "results.jsonl"))
    with Image.open(folder / "results.png") as figure:
        assert figure.text["Description"] == report.digest(folder / "results.jsonl")


def test_rows(tmp_path):
    names = ["sam", "plain", "relvit_fused", "relvit_tiled", "relvit_reference"]
    found = measure(tmp_path, "--rounds=2", "--names", *names)
    assert [(line["mode"], line["name"]) for line in found] == [
        (mode, name) for mode in ("forward", "train") for name in names
    ]
    for line in found:
        assert (line["size"], line["batch"], line["dtype"], line["compiled"]) == (64, 1, "float32", False)
        assert (line["status"], line["rounds"], len(line["seconds"])) == ("ok", 2, 2)
        assert all(second == round(second, 6) > 0 for second in line["seconds"])
        assert line["memory_bytes"] > 0
        assert line["versions"]["torch"] == torch.__version__
        assert line["machine"]["threads"] == torch.get_num_threads()
    assert len({line["run"] for line in found}) == 1
    # Appended, and as it was otherwise.
    again = measure(tmp_path, "--rounds=1", "--mode=forward", "--names=plain", "--commit=abc")
    assert again[:-1] == found
    assert again[-1]["commit"] == "abc"


def test_models_are_built_alike():
    for name in benchmark.MODELS:
        model, shape, _ = benchmark.competitor("model", name, 32)
        assert model(torch.zeros(1, *shape)).shape == (1, 1000)
        # One prefix token or layer scale more would be paid for in every block.
        assert (model.num_prefix_tokens, model.global_pool) == (0, "avg"), name
        assert not any(
            "ls1" in key or "gamma" in key.removesuffix("attn.gamma") for key, _ in model.named_parameters()
        ), name


def test_over_the_cap(tmp_path):
    (line,) = measure(tmp_path, "--cap=0", "--mode=train", "--names=plain")
    assert (line["status"], line["seconds"], line["memory_bytes"]) == ("over the cap of 0 s", [], None)


def test_out_of_memory_is_recorded_and_other_failures_propagate(monkeypatch, tmp_path):
    class Failing(torch.nn.Linear):
        error = torch.OutOfMemoryError("CUDA out of memory")

        def forward(self, x):
            raise self.error

    monkeypatch.setattr(benchmark, "Attention", lambda dim, *_, **__: Failing(dim, dim))
    plain, sam = measure(tmp_path, "--mode=train", "--names", "plain", "sam", "--rounds=1")
    assert (plain["status"], plain["seconds"], plain["memory_bytes"]) == ("out of memory", [], None)
    assert sam["status"] == "ok"
    Failing.error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        measure(tmp_path, "--mode=train", "--names=plain")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--level=model", "--names=relvit_smal"], r"unknown model 'relvit_smal' \(did you mean 'relvit_small'\?\)"),
        (["--level=layer", "--names", "plain", "relvit_fusd"], r"unknown layer .* \(did you mean 'relvit_fused'\?\)"),
        (["--size=100"], "size must be a positive multiple of 16, got 100"),
    ],
)
def test_refused(arguments, message, tmp_path):
    output = tmp_path / "results.jsonl"
    with pytest.raises(ValueError, match=message):
        benchmark.main([*arguments, f"--output={output}"])
    assert not output.exists()


def test_memory_counter():
    x = torch.randn(3, 5, requires_grad=True)
    # exp keeps its result, 15 float32; the sine keeps its input, the same storage.
    assert benchmark.kept_bytes(lambda: x.exp().sin().sum()) == 60
    # Each of them keeps its own result.
    assert benchmark.kept_bytes(lambda: x.exp().exp().sum()) == 120
    # The product keeps both factors, which were there before.
    assert benchmark.kept_bytes(lambda: x[0] * x[1]) == 0
    with torch.no_grad():
        assert benchmark.kept_bytes(lambda: x.exp().sum()) == 0


def test_peak_counter():
    x = torch.randn(3, 5)
    # At most two results of 15 float32 are there at a time, the first of them until the second is made.
    assert benchmark.peak_bytes(lambda: x.exp().exp().exp()) == 120
    assert benchmark.peak_bytes(lambda: x.exp().exp_().exp_()) == 60
    assert benchmark.peak_bytes(lambda: x[0]) == 0


def test_memory_counter_sees_what_hooks_hide():
    x = torch.randn(3, 5, requires_grad=True)

    def hidden():
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: lambda: tensor, lambda make: make()):
            return x.exp().sin().sum()

    assert benchmark.kept_bytes(hidden) == 60


def test_memory_counter_agrees_with_saved_tensor_hooks():
    setting = benchmark.Setting("layer", 96, "train", 2, "cpu", "float32", False, 1, 60.0, 0)
    cell = benchmark.Cell("plain", setting)
    cell.build()
    cell.step()
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = cell.forward()
    for tensor in (*cell.module.parameters(), cell.inputs[0], out):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    assert benchmark.kept_bytes(cell.forward) == sum(storage.nbytes() for storage in storages.values()) > 0


def test_every_line_is_one_cell(tmp_path):
    measure(tmp_path, "--rounds=1", "--mode=forward", "--names", "plain", "control")
    lines = (tmp_path / "new" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["plain", "control"]
