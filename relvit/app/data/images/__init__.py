"""Image files: find them in folders, decode them, and keep them in memory."""
