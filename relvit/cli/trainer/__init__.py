"""What `relvit fit`, `validate`, `test` and `predict` share: options, devices, processes and folders of a Trainer."""
