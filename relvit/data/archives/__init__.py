"""Readers of images inside archives: tar, WebDataset shards, Hugging Face datasets. Nothing is unpacked or copied.

Libraries read the files: Python's `tarfile` the headers of archives, `datasets` the tables of Hugging Face. The index
of WebDataset shards is ours, because `wids` has left webdataset with its version 1.0, and its last one takes a
truncated shard for a shorter one, does not compare checksums, and loses names of more than 100 characters.
"""
