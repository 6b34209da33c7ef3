"""PredictionTable: cells that are longer than the `csv` module can read."""

from types import SimpleNamespace

import torch

from relvit.app.evaluation import PredictionTable
from relvit.app.training import SeveralLabels


def test_an_image_of_thousands_of_classes(tmp_path):
    names = [f"{number:050d}" for number in range(3000)]
    table, data = PredictionTable(tmp_path / "table.csv", names), SimpleNamespace(dataset=lambda split: range(1))
    strategy = SimpleNamespace(broadcast=lambda path: path, barrier=lambda: None)
    trainer = SimpleNamespace(strategy=strategy, global_rank=0, is_global_zero=True, world_size=1, datamodule=data)
    module = SimpleNamespace(labels=SeveralLabels([0.5] * 3000))
    found = {"names": ["a,b.jpg"], "probabilities": torch.linspace(1, 0.5, 3000)[None]}
    table.on_predict_start(trainer, module)
    table.write_on_batch_end(trainer, module, found, None, (None, found["names"]))
    table.on_predict_end(trainer, module)
    header, row = (tmp_path / "table.csv").read_text().splitlines()
    assert header == "path,label,probability"
    assert row.startswith(f'"a,b.jpg",{";".join(names)},1.000000;')
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
