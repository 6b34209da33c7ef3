"""Images of other sizes and shapes than in training: native shapes, reach, bands, and whether a model takes a size."""
