"""The folder of a run, the records in it, and the processes of a run."""
