"""Tools without a subject of their own: files, remote files, messages, progress bars, random seeds, memory."""
