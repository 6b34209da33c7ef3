"""The table of a training's history, and the curves that are drawn from it."""

from relvit.app.plots import curves
from relvit.app.training.callbacks import history


def test_the_table_is_utf_8_whatever_encoding_the_system_has(tmp_path, monkeypatch):
    def open_as_ascii(path, mode="r", encoding="ascii", **options):
        return open(path, mode, encoding=encoding, **options)

    for module in (history, curves):
        monkeypatch.setattr(module, "open", open_as_ascii, raising=False)
    callback = history.History(tmp_path, telemetry=None, tensorboard=False)
    callback.rows = [{"epoch": 0, "step": 3, "val/größe": 0.5}]
    callback._write_table()
    assert "val/größe" in (tmp_path / "metrics.csv").read_text(encoding="utf-8")
    assert curves.read_metrics(tmp_path / "metrics.csv") == {"val/größe": [(0, 0.5)]}
