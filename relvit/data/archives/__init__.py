"""Images inside archives: tar, WebDataset shards, Hugging Face datasets."""
