"""Small helpers that several rooms of the application share."""
