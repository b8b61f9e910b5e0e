"""A served model in fewer bits, within a stated loss."""
