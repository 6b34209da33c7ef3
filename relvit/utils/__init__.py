"""Tools without a subject of their own: files, messages, progress bars, random seeds, memory."""
