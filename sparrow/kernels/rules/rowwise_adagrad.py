from dataclasses import dataclass
import torch
@dataclass(frozen=True, kw_only=True)
class Config:
    lr: float = 0.05
    eps: float = 1e-8
    def init_state(self, rows, dim): return {"sum": torch.zeros(rows)}
    def update(self, w, s, g, lr):
        n = s["sum"] + g.square().mean(1)
        return w - lr*g/(n.sqrt()+self.eps)[:,None], {"sum": n}
