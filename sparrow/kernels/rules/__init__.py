from typing import Any
RowRule = Any
