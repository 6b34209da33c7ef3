"""Lightning's Trainer on the command line, of `relvit fit`, `validate`, `test` and `predict`: options, processes."""
