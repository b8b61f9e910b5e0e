"""Ray: the machines of a Ray cluster prepare a log that one machine cannot hold.

Apps and the command line may import it. It imports the library.
"""

from sparrow.core.extensions import Extension

EXTENSION = Extension(
    calls_back=False,
    engine=(
        "work on a Ray cluster: its address, auto for the one that Ray finds, or local to try it"
        " here. Its machines take a file each, and must see the log and `out` under the same names."
        " The result is the same to the bit."
    ),
)
