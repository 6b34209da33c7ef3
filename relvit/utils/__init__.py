"""Helpers that several folders of the core share: messages, ranges of numbers, constants, memory, stance, old torch."""
