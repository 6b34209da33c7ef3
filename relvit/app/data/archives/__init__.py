"""Readers of images inside archives: tar, WebDataset shards, Hugging Face datasets. Nothing is unpacked or copied.

Python's `tarfile` reads the headers of archives, and Hugging Face's `datasets` reads its tables. relvit itself finds
the samples in WebDataset shards, because webdataset 1.0 dropped the package `wids`, whose last version reads a
truncated shard without an error, does not compare checksums, and loses names of more than 100 characters.
"""
