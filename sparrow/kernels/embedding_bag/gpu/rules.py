"""Row rules on tiles of fp32; `kernels/rules` defines them."""

import triton
import triton.language as tl


@triton.jit
def square_sum(x):
    """The sum of the squares of each row [ROWS, 1]."""
    return tl.sum(x * x, 1)[:, None]


@triton.jit
def _limited(x, MOST: tl.constexpr):
    norm = tl.math.sqrt_rn(square_sum(x))
    return x * tl.where(norm > MOST, tl.math.div_rn(MOST, norm), 1.0)


@triton.jit
def _bias(updates, LOG2_BETA: tl.constexpr):
    """1 - beta ** updates, in float64, rounded once."""
    return (1.0 - tl.exp2(updates.to(tl.float64) * LOG2_BETA)).to(tl.float32)


@triton.jit
def apply_rule(fields, g, lr, OF: tl.constexpr):
    """New weights and fields of state, with the regularization.

    fields: weights [ROWS, BLOCK_D], 0 beyond D, and three of state, [ROWS, BLOCK_D] or [ROWS, 1].
    g: as the weights. lr: [ROWS, 1].
    """
    w, s0, s1, s2 = fields
    RULE: tl.constexpr = OF.rule
    if RULE.clip_norm > 0:
        g = _limited(g, RULE.clip_norm)
    if RULE.weight_decay > 0 and RULE.decay == "l2":
        g = g + RULE.weight_decay * w
    if RULE.weight_decay > 0 and RULE.decay == "decoupled":
        w = w * (1.0 - lr * RULE.weight_decay)
    if RULE.name == "sgd":
        w = w - lr * g
    elif RULE.name == "adagrad":
        s0 = s0 + g * g
        w = w - tl.math.div_rn(lr, tl.math.sqrt_rn(s0) + RULE.eps) * g
    elif RULE.name == "rowwise_adagrad":
        s0 = s0 + tl.math.div_rn(square_sum(g), OF.D)
        w = w - tl.math.div_rn(lr, tl.math.sqrt_rn(s0) + RULE.eps) * g
    else:
        s2 = s2 + 1.0
        step = tl.math.div_rn(lr, _bias(s2, RULE.log2_beta1))
        root = tl.math.sqrt_rn(_bias(s2, RULE.log2_beta2))
        s0 = s0 * RULE.beta1 + g * (1.0 - RULE.beta1)
        if RULE.name == "adam":
            s1 = s1 * RULE.beta2 + (g * g) * (1.0 - RULE.beta2)
            w = w - tl.math.div_rn(step * s0, tl.math.div_rn(tl.math.sqrt_rn(s1), root) + RULE.eps)
        else:
            s1 = s1 * RULE.beta2 + tl.math.div_rn(square_sum(g), OF.D) * (1.0 - RULE.beta2)
            w = w - tl.math.div_rn(step, tl.math.div_rn(tl.math.sqrt_rn(s1), root) + RULE.eps) * s0
    if RULE.max_norm > 0:
        w = _limited(w, RULE.max_norm)
    return w, s0, s1, s2
