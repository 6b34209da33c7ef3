"""Lightning callbacks: history, progress, telemetry, predictions, early stopping."""
