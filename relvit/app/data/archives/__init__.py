"""Readers of images inside archives: tar, WebDataset shards, Hugging Face datasets. Nothing is unpacked or copied.

Python's `tarfile` reads the headers of archives, and `datasets` the tables of Hugging Face. The index of WebDataset
shards is relvit's own: webdataset 1.0 dropped its package `wids`, whose last version takes a truncated shard for a
shorter one, does not compare checksums, and loses names of more than 100 characters.
"""
