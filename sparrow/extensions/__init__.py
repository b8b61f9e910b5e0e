"""Capabilities that a run or a preparation may switch on, one folder each, see
`sparrow.core.extensions`.

They stand on the library, which imports none of them: it finds them by what their `__init__.py`
says. Apps and the command line may import them. None imports another.

Imports: training, serving and below. Imported by: analysis and above.
"""
