"""Judge a trained model: calibration by a temperature, probes of its features, robustness sets."""
