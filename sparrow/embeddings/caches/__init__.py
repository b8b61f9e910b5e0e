"""What can stand above the rows of a tier: a member is a file with a `Config`, a `Tier` with the
rows `beneath` it.
"""
