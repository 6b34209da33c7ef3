"""Commands that export, publish or serve a trained model, and `relvit predict` of an exported file."""
