"""Small helpers that several folders of the application share: files, devices, exceptions, secrets, random seeds."""
