"""Optimiser, learning rate schedule, losses, weight averages, distillation, sharding."""
