"""Images of other sizes and shapes than in training: batches of native shapes, and `set_reach`."""
