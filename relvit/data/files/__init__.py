"""Image files: find, list, decode and cache them."""
