from dataclasses import dataclass
import torch
@dataclass(frozen=True, kw_only=True)
class Config:
    lr: float = 0.1
    def init_state(self, rows, dim): return {}
    def update(self, w, s, g, lr): return w - lr*g, {}
