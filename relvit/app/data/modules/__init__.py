"""Lightning data modules, one per kind of dataset."""
