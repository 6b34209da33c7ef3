"""How blocks follow one another: one block several times, with halting of single tokens."""
