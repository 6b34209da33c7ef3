"""Trust in a trained model: calibration by a temperature, probes of its features."""
