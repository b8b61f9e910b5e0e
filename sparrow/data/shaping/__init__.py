"""Rows of a raw log into others: repaired cells, columns of structs, rows of candidates, joined side tables."""
