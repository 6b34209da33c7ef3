"""Let tests build models of one block instead of twelve, if the number of blocks does not matter."""

import timm


def use_one_block(monkeypatch):
    """Let timm build relvit's models and ViTs with one block."""
    create = timm.create_model

    def create_small(name, *args, **kwargs):
        # A universal model has only one block, and halting needs at least two steps.
        fewer = name.startswith(("relvit_", "vit_")) and "universal" not in name and "out_indices" not in kwargs
        return create(name, *args, **({"depth": 1} if fewer else {}) | kwargs)

    monkeypatch.setattr(timm, "create_model", create_small)
