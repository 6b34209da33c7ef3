"""Fast backends of relative attention, a file each; `relvit.ops.attention` chooses one and gives the reason."""
