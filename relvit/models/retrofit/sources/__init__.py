"""Families of models that `relvit.retrofit` changes, a file each; `SOURCES` in `retrofit/recognise.py` lists them.

Such a file, a source, defines the class that a model becomes: a subclass of `Retrofitted`, or of `OwnPositions` if the
original model has relative positions. The class says which classes of blocks and attention it knows. The model's
attention becomes a `GridAttention`. The original blocks have no argument for a grid, so most sources pass the grid in
an argument that the blocks hand unchanged to their attention, such as `attn_mask`, `rope` or a shared bias, together
with the argument's own value. If the attention lacks `proj`, `head_dim` or `num_heads`, the source overrides
`make_layers`. Examples: `timm_vit.py`, and `transformers_beit.py` for another library.

A new source needs a small model as a test case: a row in `CASES` of `tests/support/models/retrofit_cases.py`, or, if
the original model has relative positions, in `SOURCES` of `own_positions.py` beside it. Add the source to the lists in
`docs/retrofit.md` and in the docstring of `relvit.retrofit`.
"""
