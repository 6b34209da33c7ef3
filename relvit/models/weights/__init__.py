"""Load weights of other models: conversion of names and shapes, transfer between sizes and classes."""

from relvit.models.weights.convert import checkpoint_filter_fn, load_jax_archive

__all__ = ["checkpoint_filter_fn", "load_jax_archive"]
