"""`relvit fit`: the Lightning CLI, with a folder for each run, in which a stopped training resumes."""
