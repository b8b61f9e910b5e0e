import torch


def auc(s, y, w=None):
    w = torch.ones_like(s) if w is None else w
    u, inv = torch.unique(s, return_inverse=True)
    p = torch.zeros(len(u), dtype=torch.float64).index_add_(0, inv, (w * y).double())
    n = torch.zeros(len(u), dtype=torch.float64).index_add_(0, inv, (w * (1 - y)).double())
    below = n.cumsum(0) - n
    return float((p * (below + n / 2)).sum() / (p.sum() * n.sum()))


class Streaming:
    def __init__(self):
        self.pos = torch.zeros(65536, dtype=torch.float64)
        self.neg = self.pos.clone()
        self.sums = torch.zeros(4, dtype=torch.float64)

    def update(self, s, y, w=None):
        s = s.cpu()
        y = y.cpu()
        w = torch.ones_like(s) if w is None else w.cpu()
        b = (s * 65535).long().clamp(0, 65535)
        self.pos.index_add_(0, b, (w * y).double())
        self.neg.index_add_(0, b, (w * (1 - y)).double())
        q = s.double().clamp(1e-15, 1 - 1e-15)
        l = -(y * q.log() + (1 - y) * (-q).log1p())
        self.sums += torch.stack([w.double().sum(), (w * y).double().sum(), (w * s).double().sum(), (w * l).sum()])

    def result(self):
        n, y, p, l = self.sums.tolist()
        if not n:
            return {"examples": 0}
        r = y / n
        import math

        h = -(r * math.log(r) + (1 - r) * math.log(1 - r)) if 0 < r < 1 else math.nan
        below = self.neg.cumsum(0) - self.neg
        d = float(self.pos.sum() * self.neg.sum())
        return {
            "examples": n,
            "auc": float((self.pos * (below + self.neg / 2)).sum()) / d if d else math.nan,
            "logloss": l / n,
            "ne": l / n / h,
            "calibration": p / y if y else math.nan,
        }

    def state_dict(self):
        return {"pos": self.pos, "neg": self.neg, "sums": self.sums}

    def load_state_dict(self, s):
        self.pos, self.neg, self.sums = s["pos"].clone(), s["neg"].clone(), s["sums"].clone()


def evaluate(score, batches, *, exact=True):
    m = Streaming()
    ss, yy = [], []
    for b in batches:
        s = score(b)
        s = s[:, 0]
        m.update(s, b.labels_BT[:, 0], b.weights_B)
        ss.append(s)
        yy.append(b.labels_BT[:, 0])
    return m.result() | {"auc": auc(torch.cat(ss), torch.cat(yy))}
