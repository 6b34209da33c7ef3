"""Commands that bring a trained model to where it is used."""
