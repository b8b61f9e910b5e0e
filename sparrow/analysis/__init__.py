"""What a trained model is worth: scores of a part, slices, importance of columns, use of tables.
Pictures and pages that apps draw with.

Imports: extensions and below. Imported by: apps and above.
"""
