"""Fast backends of relative attention, a file each; `relvit.ops.attention` chooses one and gives the reason.

A backend is a module with `relative_attention(inputs)`, and with `refusal(inputs, device)` if it computes only some
inputs. Add a new backend to `BACKENDS` and `_choose` of `ops/attention.py`, to `largest_tensor` of
`ops/index_range.py`, to `BACKENDS` of `tests/support/draws.py`, from which tests compare it with the reference, and to
`docs/attention.md`.
"""
