"""Fast backends of relative attention, among which `relvit.ops.attention` chooses, and its TorchScript operator."""
