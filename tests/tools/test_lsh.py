"""The table of times of LSH attention: a row for each size, with what is kept for backward."""

import torch
from scripts import load

lsh = load("lsh")


def test_a_row_for_each_size(capsys):
    threads = torch.get_num_threads()
    try:
        lsh.main(["--sides", "4", "9", "--repeats", "1"])
    finally:
        torch.set_num_threads(threads)
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.count("forward, training") == 4
    assert [row.split("|")[1].strip() for row in rows] == ["16", "81"]


def test_what_is_kept_is_counted_once_and_without_inputs():
    x = torch.randn(10, 10, requires_grad=True)
    # exp keeps its output, and so does the product, beside the input.
    assert lsh.kept(lambda x: x.exp() * x, [x]) == 400
