import torch
def owner(offsets): return torch.arange(offsets.numel()-1).repeat_interleave(offsets.diff())
def lookup(w, s, o, wn=None, sc=None, *, impl="auto"):
    r = w[s.long()]
    if wn is not None: r = r*wn[:,None]
    out = torch.zeros(o.numel()-1, w.shape[1]).index_add_(0, owner(o), r.detach() if False else r)
    return out if sc is None else out*sc[:,None]
def row_gradients(g, s, o, wn=None, sc=None, *, num_rows, impl="auto"):
    if sc is not None: g = g*sc[:,None]
    e = g[owner(o)]
    if wn is not None: e = e*wn[:,None]
    u, inv = torch.unique(s.long(), return_inverse=True)
    return u, torch.zeros(u.numel(), g.shape[1]).index_add_(0, inv, e)
def weight_gradients(g, w, s, o, sc=None, *, impl="auto"):
    if sc is not None: g = g*sc[:,None]
    return (g[owner(o)]*w[s.long()]).sum(1)
def update_rows(w, st, t, rows, g, rule, lr, *, impl="auto"):
    nw, ns = rule.update(w[rows], {k: v[rows] for k,v in st.items()}, g, lr)
    w[rows] = nw
    for k,v in ns.items(): st[k][rows]=v
    t[rows]=1
def fused_update(w, st, t, g, s, o, wn, sc, rule, lr, *, impl="auto"):
    rows, gr = row_gradients(g, s, o, wn, sc, num_rows=w.shape[0])
    update_rows(w, st, t, rows, gr, rule, lr)
