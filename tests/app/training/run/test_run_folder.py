"""Names of runs' folders."""

from datetime import datetime

from relvit.app.training import new_run_folder


def test_two_runs_never_share_a_folder(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5)
    folders = [new_run_folder(tmp_path / "runs", "relvit_tiny", now) for _ in range(3)]
    assert [folder.name for folder in folders] == [
        "2026-01-02_03-04-05_relvit_tiny",
        "2026-01-02_03-04-05_relvit_tiny_2",
        "2026-01-02_03-04-05_relvit_tiny_3",
    ]
    assert all(folder.is_dir() for folder in folders)
