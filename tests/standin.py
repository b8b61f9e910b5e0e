"""A stand-in for a GPU, so that the paths of a device run where there is none.

A tensor on it has its numbers in host memory. It says that it is on "cuda:0", and autograd takes it
for one of a device. An operator whose tensors lie on both sides raises, as CUDA does. Every
operator that would let the host wait for a GPU is counted, and every one that would add in no fixed
order there.

The operators of `embedding_bag` run on the numbers in host memory, and none of their waits is
counted.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Bags, Rows, Table, Tables

aten = torch.ops.aten
CUDA = torch.device("cuda:0")
# operators whose result has a size that only the numbers tell, or which is on the host
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.bincount,
    aten.unique_consecutive,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
}
# operators that add in no fixed order on CUDA, whatever `use_deterministic_algorithms` says or
# unless it is on
ATOMIC = {
    aten.index_add,
    aten.index_add_,
    aten.scatter_add,
    aten.scatter_add_,
    aten.scatter_reduce,
    aten.scatter_reduce_,
    aten.index_reduce,
    aten.index_reduce_,
    aten.embedding_dense_backward,
    aten._embedding_bag_dense_backward,
    aten._efficient_attention_backward,
    aten._flash_attention_backward,
}
# operators for which `use_deterministic_algorithms(True)` raises on CUDA, as its documentation
# lists them
RAISES = {
    aten.avg_pool3d_backward,
    aten._adaptive_avg_pool2d_backward,
    aten._adaptive_avg_pool3d_backward,
    aten.adaptive_max_pool2d_backward,
    aten.fractional_max_pool2d_backward,
    aten.fractional_max_pool3d_backward,
    aten.max_unpool2d,
    aten.max_unpool3d,
    aten.upsample_linear1d_backward,
    aten.upsample_bilinear2d_backward,
    aten.upsample_bicubic2d_backward,
    aten.upsample_trilinear3d_backward,
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d_backward,
    aten.reflection_pad3d_backward,
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
    aten._ctc_loss_backward,
    aten.put,
    aten.put_,
    aten.histc,
    aten.median,
    aten.kthvalue,
    aten.grid_sampler_2d_backward,
    aten.grid_sampler_3d_backward,
}


@cache
def _backend() -> torch.device:
    """Tell torch of the device. It cannot be told to forget it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("standin")
    return torch.device("standin:0")


def register() -> None:
    """Call it before the first backward of the process: autograd then makes a queue for every
    device that there is.
    """
    _backend()


class OnDevice(Tensor):
    """A tensor of the stand-in. held: its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        out: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=_backend(),
            storage_offset=held.storage_offset(),
        )  # fmt: skip
        out.held = held
        return out

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: CUDA)  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held})"

    def record_stream(self, stream: Any) -> None:
        stream.kept += 1

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the stand-in, outside of it")


class _Stream:
    """A stream on which everything is done at once."""

    def __init__(self, device: Any = None) -> None:
        self.waited = 0  # how often it was told to wait
        self.kept = 0  # tensors whose memory was kept for it

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        self.waited += 1


class StandIn(TorchDispatchMode):
    """What happened on the device.

    Args:
        waits: what would have let the host wait, and how often.
        unordered: what would have added in no fixed order.
        sent: the largest number of elements that the host sent at once.
        stream: on which the device computes.
        refused: the name of an operator for which the device has no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.unordered: Counter[str] = Counter()
        self.sent = 0
        self.stream = _Stream()
        self.refused = ""
        self.pinned: set[int] = set()  # the memory of tensors that are pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        of = func.overloadpacket
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        mine = [t for t in given if isinstance(t, OnDevice)]
        asked = kwargs.get("device")
        there = (
            bool(mine) if asked is None else torch.device(asked).type in ("cuda", _backend().type)
        )
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if mine or there:
            self._look(of, args, kwargs, given, mine, there)
        held_args, held_kwargs = tree_map_only(OnDevice, lambda t: t.held, (args, kwargs))
        if of is aten.segment_reduce and mine:
            held_kwargs["unsafe"] = False  # here a wrong offset is found
        out = func(*held_args, **held_kwargs)
        if of is aten._to_copy and not there and kwargs.get("non_blocking"):
            self.pinned.add(out.data_ptr())
        return tree_map_only(Tensor, partial(_wrapped, mine), out) if there else out

    def _look(self, of: Any, args: Any, kwargs: Any, given: Any, mine: Any, there: bool) -> None:
        """Count what an operator would do on a GPU; raise where it could not run there."""
        name = of.__name__
        if name == self.refused:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if of in (aten._to_copy, aten.copy_):
            source, target = (
                (args[0], there)
                if of is aten._to_copy
                else (args[1], isinstance(args[0], OnDevice))
            )
            crosses = isinstance(source, OnDevice) != target
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            pageable = (
                target and source.untyped_storage().data_ptr() not in self.pinned
                if crosses
                else False
            )
            if crosses and target:
                self.sent = max(self.sent, source.numel())
            if crosses and (blocking or pageable):
                self.waits[f"{name} to the {'device' if target else 'host'}"] += 1
            return
        indexed = of in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
        if indexed and any(
            i is not None and (i.dtype == torch.bool or not isinstance(i, OnDevice))
            for i in args[1]
        ):
            self.waits[f"{name} by a mask, or by numbers of the host"] += 1
        other = [t for t in given if not isinstance(t, OnDevice) and t.dim()]
        if mine and other and not indexed:
            raise RuntimeError(
                f"{name}: tensors {[(t.device, t.shape) for t in given]} are on two devices"
            )
        if of in WAITS or (of is aten.repeat_interleave and kwargs.get("output_size") is None):
            self.waits[name] += 1
        if of is aten.segment_reduce and not kwargs.get("unsafe"):
            self.waits[name] += 1
        # whole numbers add up to the same in any order
        floats = any(t.is_floating_point() for t in mine)
        if of in RAISES or (
            floats and (of in ATOMIC or of in (aten.cumsum, aten.cumsum_, aten.bincount))
        ):
            self.unordered[name] += 1


def _wrapped(mine: list[OnDevice], out: Tensor) -> Tensor:
    """Returns the tensor of the device with these numbers: one that the operator was given, or a
    new one.
    """
    same = [t for t in mine if t.held is out]
    return same[0] if same else OnDevice(out)


class _Names(TorchFunctionMode):
    """Takes "cuda" for the stand-in."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = (
            [_there(a) for a in args],
            {name: _there(a) for name, a in (kwargs or {}).items()},
        )
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _backend():
            del kwargs["device"]
            return func(*args, **kwargs).to(_backend())
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            self.device.pinned.add(pinned.untyped_storage().data_ptr())
            return pinned
        return func(*args, **kwargs)


def _there(x: Any) -> Any:
    is_cuda = isinstance(x, (str, torch.device)) and str(x).startswith("cuda")
    return _backend() if is_cuda else x


def _on_host(x: Any) -> Any:
    """Returns arguments of `embedding_bag` with the numbers of tensors in their place."""
    if isinstance(x, OnDevice):
        return x.held
    if isinstance(x, Tables):
        return Tables([_on_host(table) for table in x])
    if isinstance(x, Table):
        return replace(x, levels=tuple(_on_host(level) for level in x.levels))
    if isinstance(x, Rows):
        names = ("payload", "state", "touched_R", "changed_R", "rows_R")
        return replace(x, **{name: _on_host(getattr(x, name)) for name in names})
    if isinstance(x, Bags):
        names = ("slots_N", "offsets_B1", "weights_N", "inverses")
        return replace(x, **{name: _on_host(getattr(x, name)) for name in names})
    if isinstance(x, dict):
        return {name: _on_host(value) for name, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_on_host(value) for value in x)
    return x


def _on_device(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        host = [_on_host(a) for a in args]
        there = any(isinstance(t, OnDevice) for a in args for t in _some(a))
        out = operator(*host, **{**kwargs, "impl": "auto"})
        return tree_map_only(Tensor, OnDevice, out) if there else out

    return run


def _some(x: Any) -> list[Any]:
    """Returns tensors of an argument that say where it is."""
    if isinstance(x, Bags):
        return [x.slots_N]
    return [level.touched_R for level in x.levels] if isinstance(x, Tables) else tree_leaves(x)


@contextmanager
def standin() -> Iterator[StandIn]:
    """A context in which "cuda" is the stand-in."""
    device = StandIn()

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True to a scalar")
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "is_bf16_supported": lambda *_: True,
            "get_device_capability": lambda *_: (8, 0),
            "mem_get_info": lambda *_: (1 << 36, 1 << 36),
            "Stream": _Stream,
            "stream": on,
            "current_stream": lambda *_: device.stream,
            "_lazy_init": lambda: None,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *_: None,
        }.items():
            patch.setattr(torch.cuda, name, value)
        for name in embedding_bag.__all__:
            operator = getattr(embedding_bag, name)
            if inspect.isfunction(operator) and "impl" in inspect.signature(operator).parameters:
                patch.setattr(embedding_bag, name, _on_device(operator))
        with within(device):
            yield device


@contextmanager
def within(device: StandIn) -> Iterator[None]:
    """A context in which a thread has the stand-in. The one that calls `standin` has it."""
    with device, _Names(device):
        yield
