"""Programs that stand on the library and its extensions: training and scoring need none of them.

The command line alone imports them. An app imports another only where that is a part of it;
`pyproject.toml` has these.

Imports: analysis and below. Imported by: cli.
"""
