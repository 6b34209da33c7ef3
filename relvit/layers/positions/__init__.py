"""Relative and absolute positions: one paper per file."""
