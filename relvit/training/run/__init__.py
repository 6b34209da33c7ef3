"""The folder of a run and what is recorded there."""
