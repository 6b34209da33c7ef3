"""`relvit fit`: the Lightning CLI with run folders that a stopped training goes on in."""
