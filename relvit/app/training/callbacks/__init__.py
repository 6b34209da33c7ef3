"""Lightning callbacks: history, progress, telemetry, pictures of training images, early stopping."""
