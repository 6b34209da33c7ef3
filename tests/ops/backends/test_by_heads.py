"""Threads that compute whole heads: same results as one thread, modes, errors, forks, the number of threads."""

import multiprocessing
import threading
import time
from concurrent.futures import wait
from functools import partial

import pytest
import torch
from draws import draw_case, leaves
from torch.utils.flop_counter import FlopCounterMode

from relvit.ops import num_tokens, relative_attention
from relvit.ops.backends import by_heads, tiled
from relvit.ops.backends.tile import Tile
from relvit.utils.memory import allocations

CASES = {
    "separate tables": {"which": "qkvb", "per_head": "vb"},
    "a joint bias": {"which": "b", "per_head": "b", "layout": "joint"},
    "a joint bias, later keys hidden": {"which": "b", "per_head": "b", "layout": "joint", "is_causal": True},
    "dropout": {"which": "kv", "dropout_p": 0.3},
    "padding": {"which": "kv", "hidden": "padding"},
    "a mask with a gradient": {"which": "k", "hidden": "numbers"},
}


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch):
    """Split even tiny inputs by heads, and each head into several tiles; restore PyTorch's number of threads."""
    monkeypatch.setattr(by_heads, "LEAST_LOGITS", 1)
    monkeypatch.setattr(tiled, "TILE_LOGITS", 1)
    monkeypatch.setattr(tiled, "LEAST_QUERIES", 5)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def computing(monkeypatch):
    """Record which threads compute tiles, and how many OpenMP threads each of them has."""
    weights, seen = tiled._weights, set()

    def spy(*arguments):
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return weights(*arguments)

    monkeypatch.setattr(tiled, "_weights", spy)
    return seen


def step(threads, hidden="nothing", dropout_p=0.0, is_causal=False, **case):
    """Compute the result and all gradients with this number of threads."""
    torch.set_num_threads(threads)
    q, k, v, terms, grid = draw_case(4, 3, prefix=1, batch=3, **case)
    generator, n, options = torch.Generator().manual_seed(1), num_tokens(grid), {}
    if hidden == "padding":
        grid = grid._replace(valid=torch.rand(3, n - 1, generator=generator) < 0.6)
    elif hidden == "numbers":
        options["attn_mask"] = torch.randn(n, n, generator=generator, dtype=q.dtype).requires_grad_()
    inputs = [*leaves(q, k, v, terms), *options.values()]
    options |= {"dropout_p": dropout_p, "is_causal": is_causal, "backend": "tiled"}
    torch.manual_seed(2)
    out = relative_attention(q, k, v, terms, grid, **options)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, inputs, cotangent)]


def attend(**options):
    q, k, v, terms, grid = draw_case(4, 3, prefix=1, batch=3)
    return relative_attention(q, k, v, terms, grid, backend="tiled", **options)


@pytest.mark.parametrize("case", CASES)
def test_two_threads_compute_the_bits_of_one(case, computing):
    one = step(1, **CASES[case])
    assert computing == {("MainThread", 1)}
    computing.clear()
    for _ in range(3):
        for got, expected in zip(step(2, **CASES[case]), one, strict=True):
            assert torch.equal(got, expected)
    others = {entry for entry in computing if entry[0] != "MainThread"}
    assert {number for _, number in others} == {1}


def test_the_modes_of_the_caller_hold(computing):
    torch.set_num_threads(1)
    expected = attend()
    torch.set_num_threads(2)
    with torch.inference_mode():
        out = attend()
    assert out.is_inference()
    assert torch.equal(out, expected)
    # If the tiles were computed in bfloat16, results would differ by 1e-3.
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(), expected)
    assert "MainThread" in {name for name, _ in computing}
    assert len(computing) > 1


def test_pytorch_keeps_its_number_of_threads():
    by_heads._served_queue.cache_clear()
    torch.set_num_threads(2)
    attend()
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), later) == (2, [2])


def tiles_of_heads(number):
    return [Tile(head, slice(0, 1), slice(head, head + 1), slice(0, 9)) for head in range(number)]


def test_an_error_of_a_thread_reaches_the_caller_when_no_thread_computes():
    begun, ended = [], []

    def compute(tiles):
        for tile in tiles:
            begun.append(tile)
            if tile.number == 0:
                while len(begun) < 2:
                    time.sleep(0.001)
                raise MemoryError("no memory for head 0")
            time.sleep(0.05)
            ended.append(tile)

    with pytest.raises(MemoryError, match="no memory for head 0"):
        by_heads.run(compute, tiles_of_heads(500), 2)
    assert 1 < len(begun) == 1 + len(ended) < 500
    done = []
    by_heads.run(done.extend, tiles_of_heads(9), 2)
    assert len(done) == 9


def test_after_an_interruption_the_heads_that_are_left_stay_uncomputed(monkeypatch):
    done = []

    def compute(tiles):
        for tile in tiles:
            time.sleep(0.01)
            done.append(tile)

    def interrupt(futures):
        waiting.extend(futures)
        raise KeyboardInterrupt

    waiting = []
    monkeypatch.setattr(by_heads, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        by_heads.run(compute, tiles_of_heads(500), 2)
    wait(waiting)
    assert len(done) < 500


def test_a_forked_process_has_threads_of_its_own():
    # The tiles compute nothing, because PyTorch's products on several OpenMP threads hang in a forked process.
    tiles, done = tiles_of_heads(6), []
    context = multiprocessing.get_context("fork")
    compute_in_threads = partial(by_heads.run, done.extend, tiles, 2)
    compute_in_threads()

    def compute_again():
        done.clear()
        compute_in_threads()
        assert sorted(done, key=lambda tile: tile.number) == tiles

    child = context.Process(target=compute_again)
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0
    assert sorted(done, key=lambda tile: tile.number) == tiles


def test_profilers_and_counters_see_all_operations(computing):
    def counted(threads):
        torch.set_num_threads(threads)
        with FlopCounterMode(display=False) as counter:
            attend()
        return counter.get_total_flops(), sum(size for size in allocations(attend) if size > 0)

    one, two = counted(1), counted(2)
    assert one[0] > 0
    assert one == two


@pytest.mark.parametrize(
    ("threads", "heads", "queries", "keys", "expected"),
    [
        (2, 12, 2048, 2048, 2),
        (2, 12, 2048, 2047, 1),
        (4, 12, 8192, 600, 4),
        (2, 3, 2048, 2048, 1),
        (1, 12, 9999, 9999, 1),
    ],
)
def test_only_large_grids_whose_heads_the_threads_share_equally(threads, heads, queries, keys, expected, monkeypatch):
    monkeypatch.setattr(by_heads, "LEAST_LOGITS", 1 << 22)
    torch.set_num_threads(threads)
    query, key = torch.empty(1, heads, queries, 1), torch.empty(1, heads, keys, 1)
    assert by_heads.threads_by_heads(query, key) == expected
    assert by_heads.threads_by_heads(query.to("meta"), key.to("meta")) == 1
