from typing import Literal
Impl = Literal["auto","reference","cpp"]
