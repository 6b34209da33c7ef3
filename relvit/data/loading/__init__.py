"""Data loaders: batches, samplers, shards for evaluation, deterministic augmentation."""
