"""Readers of images inside archives: tar, WebDataset shards, Hugging Face datasets. Nothing is unpacked or copied."""
