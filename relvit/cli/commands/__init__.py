"""Commands that are no Trainer method, one file each."""
