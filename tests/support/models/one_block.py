"""Models of one block instead of twelve, where the number of blocks makes no difference."""

import timm


def use_one_block(monkeypatch):
    """Let timm create relvit's models and ViTs with one block."""
    create = timm.create_model

    def create_small(name, *args, **kwargs):
        # A universal model has one block, and halting needs two steps.
        fewer = name.startswith(("relvit_", "vit_")) and "universal" not in name and "out_indices" not in kwargs
        return create(name, *args, **({"depth": 1} if fewer else {}) | kwargs)

    monkeypatch.setattr(timm, "create_model", create_small)
