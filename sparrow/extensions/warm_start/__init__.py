"""Warm start: a run begins with what another run learnt, such as that of the day before, or with
given vectors.

Apps and the command line may import it. It imports the library.
"""

from sparrow.core.extensions import Extension

EXTENSION = Extension(applies=lambda run, options: bool(run.init_from or run.tables.init))
