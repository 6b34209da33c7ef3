"""Commands that export, publish or serve a trained model."""
