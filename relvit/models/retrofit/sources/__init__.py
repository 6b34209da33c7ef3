"""Families of models that `relvit.retrofit` changes, a file each; `SOURCES` in `retrofit/recognise.py` lists them.

A source derives the class that a model becomes from `Retrofitted`, or from `OwnPositions` if the model brings relative
positions, and says which blocks and attention it knows. The grid travels in the place of `attn_mask`, `rope` or a
shared bias. Attention becomes a `GridAttention`; if the attention has no `proj`, `head_dim` and `num_heads`, the source
overrides `make_layers`. Examples: `timm_vit.py`, and `transformers_beit.py` for another library.

Small models of a source are tested by a row in `CASES` of `tests/support/models/retrofit_cases.py`, or in `SOURCES` of
`own_positions.py` beside it if they bring relative positions. `docs/retrofit.md` and the docstring of `relvit.retrofit`
list the source.
"""
