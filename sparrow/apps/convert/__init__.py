"""A model folder -> files for other runtimes. Sparrow writes them, and answers no request with any
of them.
"""

from sparrow.apps.convert.write import To, convert

__all__ = ["To", "convert"]
