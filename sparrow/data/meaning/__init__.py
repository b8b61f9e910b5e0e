"""What the columns of a stranger's log mean: a first schema, guessed from its beginning."""
