"""Number formats and rounding, defined in plain torch. `kernels/quantise` does the same in C++, bit
for bit.

A format is an element (which numbers there are), a scale that some numbers share, and perhaps a
shift that a few of them share (`Format`). Elements and formats are data: a row of a table each. To
add one, add its row. Importers name the file, so that a run loads what it uses.

Imports: core. Imported by: kernels and above.
"""
