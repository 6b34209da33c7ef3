"""Optimiser, learning rate schedule, losses, weight averages, distillation, strategies that are refused."""
