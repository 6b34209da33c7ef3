"""Lightning's Trainer on the command line, for `relvit fit`, `validate`, `test` and `predict`: options and processes."""
