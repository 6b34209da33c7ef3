"""Checkpoints: read, write, resume, average, start from pretrained weights."""
