"""The benchmark: ratios computed by hand, the count of memory, its rows and tables, refused arguments."""

import re

import pytest
import torch
from one_block import use_one_block
from PIL import Image
from scripts import ROOT, load

benchmark, report, peers = map(load, ("benchmark", "benchmark_report", "peers"))
FOLDER = ROOT / "docs" / "benchmarks"


def row(name, seconds, memory=None, status="ok", **other):
    shared = {"run": "2026-01-02T03:04:05Z", "level": "model", "size": 224, "mode": "train", "batch": 6, "seed": 0}
    place = {"device": "cpu", "dtype": "float32", "compiled": False, "rounds": 3, "cap": 60.0, "commit": "abc"}
    machine = {"processor": "P", "cores": 2, "threads": 1, "gpu": None}
    found = {"name": name, "seconds": seconds, "memory_bytes": memory, "status": status}
    return {**shared, **place, **found, "versions": {"torch": "2"}, "machine": machine, "keeps_memory": True} | other


def rows(**other):
    return [
        row("plain", [0.1, 0.2, 0.4], 2 * 2**20, **other),
        row("control", [0.11, 0.2, 0.2], 2 * 2**20, **other),
        row("relvit_small", [0.3, 0.3, 0.4], 5 * 2**20, **other),
        row("rope", [], None, "out of memory", **other),
    ]


def measure(tmp_path, *arguments):
    """Run a tiny benchmark of layers, and return the rows of its file."""
    output = tmp_path / "new" / "results.jsonl"
    benchmark.main(["--level=layer", "--size=64", "--batch=1", "--device=cpu", f"--output={output}", *arguments])
    return report.read(output)


def test_ratios_pair_the_rounds():
    # The ratios per round are 3, 1.5, 1 and 1.1, 1, 0.5.
    assert report.ratios(rows()) == pytest.approx({"plain": 1, "control": 1, "relvit_small": 1.5})
    # The ratios per round are 9, 1, 1, with the median 1; the ratio of the medians, 0.3 and 0.1, would be 3.
    assert report.ratios([row("plain", [0.1, 0.3, 0.1]), row("a", [0.9, 0.3, 0.1])])["a"] == pytest.approx(1.0)
    assert report.ratios(rows(), memory=True) == {"plain": 1, "control": 1, "relvit_small": 2.5}
    assert report.ratios(rows()[1:]) == report.ratios([row("plain", [1.0], 0)], memory=True) == {}
    with pytest.raises(ValueError, match=r"2 samples of 'rope', 3 of 'plain' in run 2026-01-02"):
        report.ratios([*rows(), row("rope", [0.1, 0.1])])


@pytest.fixture(scope="module")
def tables():
    """The tables of two runs at one size, and of one run at another size."""
    slow = [row("plain", [9.0] * 3, 0, run="later", mode="forward"), row("rope", [18.0] * 3, 0, run="later")]
    return report.render([*rows(), *slow, row("control", [1.0] * 3, size=384)])


def test_each_run_has_a_table_below_the_heading_of_its_machine(tables):
    assert tables.count("\n## P, 2 cores, 1 threads; torch 2\n") == 1
    assert tables.count("\n### Models, float32, batch 6\n") == 2
    assert "\nRun 2026-01-02T03:04:05Z, 3 rounds, commit abc.\n" in tables


def test_cells_have_the_median_and_the_ratio_to_plain_or_what_went_wrong(tables):
    assert "| 224 px, train, ms | 224 px, train, MiB | 384 px, train, ms |" in tables
    for line in (
        "| `plain` | 200.00, 1.00 | 2.0, 1.00 | – |",
        "| `relvit_small` | 300.00, 1.50 | 5.0, 2.50 | – |",
        "| `control` | 200.00, 1.00 | 2.0, 1.00 | 1000.00 |",
        "| `rope` | out of memory | – | – |",
    ):
        assert line in tables


def test_a_table_has_no_column_of_zeros_and_no_ratio_without_plain(tables):
    assert "| `plain` | 9000.00, 1.00 | – |\n" in tables
    assert "| `rope` | – | 18000.00 |\n" in tables


def test_summary_has_the_lowest_and_the_highest_of_all_runs():
    later = [row("plain", [0.2] * 3, run="later"), row("relvit_small_tiled", [0.24] * 3, run="later")]
    others = [*rows(mode="forward"), *rows(device="cuda", run="gpu"), *rows(keeps_memory=False, run="first")]
    measured = [*rows(), *later, *others]
    unmeasured = " | not measured, not measured"
    ours = next(line for line in report.summary(measured).splitlines() if "`relvit_small`" in line)
    assert ours == f"| `relvit_small`{unmeasured} | 1.50, 1.20–1.50{2 * unmeasured} | 2.50 |"


def test_figure_has_the_last_run_of_each_size():
    def layers(size, plain, tiled, reference, **other):
        found = {"plain": (plain, 10), "relvit_tiled": (tiled, 15), "relvit_reference": (reference, 3000)}
        return [
            row(name, [seconds] * 3, memory, level="layer", size=size, **other)
            for name, (seconds, memory) in found.items()
        ]

    measured = [
        *layers(448, 0.1, 0.3, 1.0),
        # A later run of the same setting replaces the earlier one, but not if its mode or device is another one.
        *layers(448, 0.1, 0.2, 1.2, run="later"),
        *layers(448, 0.1, 0.9, 0.9, mode="forward"),
        *layers(448, 0.1, 0.9, 0.9, device="cuda"),
        *layers(224, 0.1, 0.1, 0.4),
        *layers(1024, 0.1, 0.2, 9.0)[:2],
    ]
    time, memory = report.draw(measured).axes
    ours, theirs = time.lines[:2]
    assert list(ours.get_xdata()) == [196, 784, 4096]
    assert list(ours.get_ydata()) == pytest.approx([1, 2, 2])
    assert list(theirs.get_xdata()) == [196, 784]
    assert list(theirs.get_ydata()) == pytest.approx([4, 12])
    assert memory.get_title("left") == "relvit's layer: 1.50 times the memory\nof plain attention, 4,096 patches"


def test_committed_files_are_those_of_the_committed_samples():
    of_gpu = report.render(report.read(FOLDER / "h200.jsonl"), "h200.jsonl")
    assert (FOLDER / "h200.md").read_text() == of_gpu
    found = report.read(FOLDER / "results.jsonl")
    assert (FOLDER / "results.md").read_text() == report.render(found)
    readme = (ROOT / "README.md").read_text()
    assert report.replaced(readme, report.summary(found)) == readme
    assert readme.count(report.BEGIN) == 1
    with Image.open(FOLDER / "results.png") as image:
        assert image.text["Description"] == report.digest(FOLDER / "results.jsonl")
    figure = report.draw(found)
    figure.canvas.draw()
    assert len(figure.axes) == 6
    for axes in figure.axes:
        assert not axes.get_window_extent().overlaps(axes.get_legend().get_window_extent())
        assert figure.bbox.x1 > axes._left_title.get_window_extent().x1


@pytest.mark.slow
def test_rows(tmp_path):
    names = ["sam", "plain", "relvit_tiled"]
    found = measure(tmp_path, "--rounds=2", "--names", *names)
    assert [(line["mode"], line["name"]) for line in found] == [
        (mode, name) for mode in ("forward", "train") for name in names
    ]
    for line in found:
        assert (line["size"], line["batch"], line["dtype"], line["compiled"]) == (64, 1, "float32", False)
        assert (line["status"], line["rounds"], len(line["seconds"])) == ("ok", 2, 2)
        assert all(second == round(second, 6) > 0 for second in line["seconds"])
        assert line["memory_bytes"] > 0
        assert (line["versions"]["torch"], line["machine"]["threads"]) == (torch.__version__, torch.get_num_threads())
    committed = report.read(FOLDER / "results.jsonl")[-1]
    assert set(found[0]) == set(committed)
    # New rows are appended, and old rows do not change.
    again = measure(tmp_path, "--rounds=1", "--mode=forward", "--names=plain", "--commit=abc", "--cap=0")
    assert again[:-1] == found
    last = again[-1]
    assert (last["commit"], last["status"], last["seconds"]) == ("abc", "over the cap of 0 s", [])


# These parameters belong to a position, to the halting of a universal model, or to a mixer that is no attention.
OWN = r"pos_embed|rope\.freqs|signals\.gain|blocks\.0\.attn\.((position|rel_pos)\..*|beta|gamma|kernel|u|v)"


def test_competitors_are_built_alike(monkeypatch):
    use_one_block(monkeypatch)
    shared = {}
    with torch.device("meta"):
        for name in benchmark.MODELS:
            model, shape, _ = benchmark.competitor("model", name, 32)
            assert (shape, model.num_classes) == ((3, 32, 32), 1000)
            # An additional prefix token, layer scale, norm or bias would cost time in each block.
            assert (model.num_prefix_tokens, model.global_pool) == (0, "avg"), name
            keys = [key for key, _ in model.named_parameters() if not re.fullmatch(OWN, key)]
            shared[name] = {key.replace("qk_v", "qkv") for key in keys}
            assert shared[name] == shared["plain"], name
    for name in benchmark.AFTS:
        layer, shape, others = benchmark.competitor("aft", name, 64)
        assert layer(torch.zeros(1, *shape), *others).shape == (1, 16, 384)


@pytest.mark.parametrize("level", ["layer", "aft", "lsh"])
def test_layers_have_biases_and_pass_the_gradient_on(level):
    for name in benchmark.COMPETITORS[level].keys() - peers.CLASSES.keys():
        setting = benchmark.Setting(level, 32, "train", 1, "cpu", "float32", False, 1, 60.0, 0)
        cell = benchmark.Cell(name, setting)
        cell.build()
        assert cell.inputs[0].requires_grad
        assert all(part.bias is not None for part in cell.module.modules() if isinstance(part, torch.nn.Linear)), name


def test_failures_are_recorded_and_stop_no_other(monkeypatch, tmp_path):
    class Failing(torch.nn.Linear):
        error = torch.OutOfMemoryError("CUDA out of memory")

        def forward(self, x):
            raise self.error

    monkeypatch.setattr(benchmark, "Attention", lambda dim, *_, **__: Failing(dim, dim))
    plain, sam = measure(tmp_path, "--mode=train", "--names", "plain", "sam", "--rounds=1")
    assert (plain["status"], plain["seconds"], plain["memory_bytes"]) == ("out of memory", [], None)
    assert sam["status"] == "ok"
    Failing.error = RuntimeError("CUDA error: an illegal memory access was encountered\nfor this reason")
    with pytest.raises(RuntimeError, match=r"^plain, 64 px, train: failed: RuntimeError: CUDA error: .* encountered$"):
        measure(tmp_path, "--mode=train", "--names", "plain", "sam", "--rounds=1")
    *_, plain, sam = report.read(tmp_path / "new" / "results.jsonl")
    assert plain["status"].startswith("failed: RuntimeError")
    assert len(sam["seconds"]) == 1
    assert "| `plain` | failed: RuntimeError: CUDA" in report.render([plain, sam])


def test_when_the_time_is_over_no_cell_begins_and_rounds_end(tmp_path, monkeypatch):
    names = ("--mode=forward", "--names", "plain", "sam")
    assert [row["status"] for row in measure(tmp_path, *names, "--minutes=0")] == ["no time left"] * 2
    now, begun = benchmark.time.monotonic(), []
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now + (len(begun) > 1))
    prepare = benchmark.Cell.prepare
    monkeypatch.setattr(benchmark.Cell, "prepare", lambda cell: (begun.append(cell), prepare(cell)))
    *_, plain, sam = measure(tmp_path, *names, "--minutes=0.01", "--rounds=9")
    assert len(plain["seconds"]) == len(sam["seconds"]) == benchmark.LEAST_ROUNDS


def test_a_cell_that_may_not_end_in_time_does_not_begin(tmp_path, monkeypatch):
    now, begun = benchmark.time.monotonic(), []
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now + 40 * len(begun))
    prepare = benchmark.Cell.prepare
    monkeypatch.setattr(benchmark.Cell, "prepare", lambda cell: (begun.append(cell), prepare(cell)))
    # The second layer would begin after 40 of 60 seconds, and take another 40 seconds.
    plain, sam = measure(tmp_path, "--mode=forward", "--names", "plain", "sam", "--minutes=1", "--rounds=1")
    assert (plain["status"], sam["status"]) == ("ok", "no time left")


def test_the_cap_leaves_out_compilation(tmp_path, monkeypatch):
    took = iter((100.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(benchmark.Cell, "seconds_of_step", lambda cell: next(took))
    monkeypatch.setattr(benchmark.Cell, "bytes_of_step", lambda cell: 1)
    (plain,) = measure(tmp_path, "--mode=forward", "--names", "plain", "--compile", "--rounds=1")
    assert (plain["status"], plain["seconds"]) == ("ok", [1.0])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--names=relvit_fuse", "layer is 'relvit_fuse'; allowed are 'plain', .*did you mean 'relvit_fused'"),
        ("--size=100", "multiple of 16, got 100"),
    ],
)
def test_refused(argument, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        measure(tmp_path, argument)
    assert list(tmp_path.iterdir()) == []


def test_memory_counters():
    x = torch.randn(3, 5, requires_grad=True)

    def hidden():
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: lambda: tensor, lambda make: make()):
            return x.exp().sin().sum()

    # exp keeps its result, 15 float32 numbers, and the sine keeps its input in the same storage. Hooks that wrap saved
    # tensors must not hide them.
    assert benchmark.kept_bytes(lambda: x.exp().sin().sum()) == benchmark.kept_bytes(hidden) == 60
    # The product keeps both factors, which existed before the call.
    assert benchmark.kept_bytes(lambda: x[0] * x[1]) == 0
    with torch.no_grad():
        # At most two results of 15 float32 numbers exist at a time, because each result is freed when the next is
        # computed.
        assert benchmark.peak_bytes(lambda: x.exp().exp().exp()) == 120
        assert benchmark.peak_bytes(lambda: x.exp().exp_().exp_()) == 60


@pytest.mark.parametrize("name", peers.CLASSES)
def test_layers_of_other_authors_where_they_are_installed(name):
    if not peers.installed(name):
        pytest.skip(f"{name} is not installed; tools/peers.py says how to install it")
    layer, shape, others = benchmark.competitor("layer", name, 64)
    assert layer(torch.randn(2, *shape), *others).shape == (2, *shape)
