"""Where rows are: a member is a file with a `Config`, a `Tier` that says what is its own."""
