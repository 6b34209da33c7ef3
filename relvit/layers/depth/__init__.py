"""Depth: one block several times, with halting of single tokens, beside blocks one after the other."""
