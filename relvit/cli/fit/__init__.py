"""`relvit fit`, `validate`, `test` and `predict`: the Lightning CLI with run folders."""
