"""Attributes and functions of torch that bypass dispatch. A lazy tensor would pass through them
unseen, so they are wrapped at the first lazy()."""

from __future__ import annotations

import functools
import os
from typing import Any

from torch.utils import _pytree as pytree

from ._torch import DATA, GRAD, NUMPY, SETTING_UP, set_data, torch, untyped_storage
from . import _control_flow, _core, _ctc, _packed
from ._errors import UnsupportedError
from ._settled import alias_of, count_write
from ._tensor import LazyTensor, plain

aten = torch.ops.aten

_installed = False


class _Attribute(property):
    """In the place of an attribute of torch's tensors. It tells of whose class it is, as that did:
    the compiler of torch 2.11 asks every accessor for it when it is imported."""

    def __init__(self, of: Any, get: Any, set: Any) -> None:
        super().__init__(get, set, getattr(of, "__delete__", None), of.__doc__)
        self.__name__ = of.__name__
        self.__objclass__ = of.__objclass__


def install() -> None:
    """Wrap them, once in a process."""
    global _installed
    with SETTING_UP:
        if not _installed:
            _install()
        _installed = True


def _install() -> None:
    def guarded_data(self: torch.Tensor, value: Any) -> None:
        if _core.is_lazy(self):
            _set_lazy_data(self, value)
        else:
            _keep_leaves(plain(self))
            DATA.__set__(self, plain(value) if isinstance(value, torch.Tensor) else value)
            if _core.settled(self) is not None:
                _core.resettle(self, alias_of(self))

    def set_grad(self: torch.Tensor, value: Any) -> None:
        if value is not None and _core.is_lazy(value) and not _core.is_lazy(self):
            value = plain(value)
        if _core.is_lazy(self) and torch.is_inference_mode_enabled():
            # torch 2.15 makes the node of a view here, and in inference mode it cannot
            with torch.inference_mode(False):
                GRAD.__set__(self, value)
        else:
            GRAD.__set__(self, value)

    torch.Tensor.data = _Attribute(DATA, _core.data_of, guarded_data)  # type: ignore[assignment]
    torch.Tensor.grad = _Attribute(GRAD, GRAD.__get__, set_grad)  # type: ignore[assignment]

    os.register_at_fork(after_in_child=_core.forked)
    _core.factories_setup()
    new = torch.nn.Parameter.__new__

    # A Parameter takes the class of its data, so a settled factory is replaced by its memory.
    def new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        return new(
            cls,
            plain(data) if isinstance(data, LazyTensor) and _core.settle(data) else data,
            requires_grad,
        )

    torch.nn.Parameter.__new__ = new_parameter  # type: ignore[method-assign]

    resolve_conj, is_conj = torch.resolve_conj, torch.is_conj

    def resolve(input: torch.Tensor) -> torch.Tensor:
        return input.resolve_conj() if isinstance(input, LazyTensor) else resolve_conj(input)

    def conjugated(input: torch.Tensor) -> bool:
        return input.is_conj() if isinstance(input, LazyTensor) else is_conj(input)

    torch.resolve_conj, torch.is_conj = resolve, conjugated

    import torch.utils as utils

    swap: Any = utils.swap_tensors

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if _core.is_lazy(t1) != _core.is_lazy(t2):
            raise UnsupportedError(
                "swap_tensors() of a lazy and a plain tensor. Make the lazy one plain with "
                "x.torch()"
            )
        if not _core.is_lazy(t1):
            _keep_leaves(t1)
            _keep_leaves(t2)
        both: tuple[Any, Any] = t1, t2
        handles: list[tuple[Any, Any]] = [
            (t, getattr(t, "_v")) for t in both if isinstance(t, LazyTensor)
        ]
        try:
            swap(t1, t2)
        except BaseException:  # torch may have exchanged attributes before it refused
            for t, handle in handles:
                t._v = handle
            raise
        _core.rewrap(t1)
        _core.rewrap(t2)

    utils.swap_tensors = swap_tensors

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(_control_flow.refused("a higher-order operator"))

    _memory()
    _uncounted_writes()
    _control_flow.install()
    _traces()
    _many_gpus()
    _quick_rules()
    _lazy_states()
    _packed.install()
    _ctc.install()
    for hop in list(getattr(torch._ops, "_higher_order_ops", {}).values()):
        try:
            hop.py_impl(LazyTensor)(refuse)
        except Exception:  # registered already, or a kind that takes no classes
            pass


def _traces() -> None:
    """Refuse lazy tensors where make_fx traces: it takes what it does not know for constants, and
    the graph would give the values of this batch, or of nothing, each time it is called."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as Tracer

    original = Tracer.__torch_dispatch__

    @functools.wraps(original)
    def trace(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if LazyTensor in types:
            raise UnsupportedError(
                f"{func} on a lazy tensor is traced by make_fx (torch.func.linearize, "
                "torch.export), whose graph would keep this batch's values for good. Make the "
                "tensor plain with x.torch() before; torch.func.jvp and torch.compile take lazy "
                "ones"
            )
        return original(self, func, types, args, kwargs)

    Tracer.__torch_dispatch__ = trace  # type: ignore[method-assign]


def _many_gpus() -> None:
    """Refuse lazy tensors where `DataParallel` scatters them: its copies of the model are made and
    run by C++ that takes their memory."""
    original = torch.nn.DataParallel.forward

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        n = len(self.device_ids or ())
        if n > 1 and any(map(_core.is_lazy, pytree.tree_leaves((inputs, kwargs)))):
            raise UnsupportedError(
                f"DataParallel over {n} GPUs on a lazy batch: it copies the model and the rows of "
                "the batch in each call, which cannot be recorded. Give the batch to "
                "model.module, on one GPU, or use DistributedDataParallel. If the result of a row "
                "depends on that row alone, koila.opaque(model) runs it on slices"
            )
        return original(self, *inputs, **kwargs)

    torch.nn.DataParallel.forward = forward  # type: ignore[method-assign]


def _quick_rules() -> None:
    """Replace the look-up that torch makes before every dispatch to Python by a quicker one, see
    koila__find_rule in operators.c. Torch fetches the function once in a process: if it dispatched
    to another class before, this has no effect."""
    from torch._library import simple_registry

    find = getattr(simple_registry, "find_torch_dispatch_rule", None)
    if find is not None:
        _core.find_rules(find)
        simple_registry.find_torch_dispatch_rule = _core.find_rule  # type: ignore[assignment]


def _lazy_states() -> None:
    """Give recurrent layers and cells a lazy initial state for a lazy input.

    Without a state they start from `torch.zeros`, a plain tensor, and torch adds the gates of the
    input to what it makes of the state in place: the rest of the step would be plain and whole. A
    lazy factory is sliced like the input. So would a plain state be, that of another step or a
    parameter: it is recorded, as `h - 0`, which changes no bit of it."""
    import types

    packed, lazy = torch.nn.utils.rnn.PackedSequence, LazyTensor  # seen by `forward` as a closure

    def recur(self: Any, x: Any, hx: Any) -> Any:
        if hasattr(self, "_update_flat_weights"):
            self._update_flat_weights()
        return _packed.recur(self, x, hx)

    def zeros_of_layers(self: Any, x: Any, data: Any) -> Any:
        sizes = x.batch_sizes if isinstance(x, packed) else None
        if sizes is None and data.dim() not in (2, 3):
            return None
        rows = (
            int(sizes[0])
            if sizes is not None
            else None
            if data.dim() == 2
            else data.size(0 if self.batch_first else 1)
        )
        n = self.num_layers * (2 if self.bidirectional else 1)
        lead = (n,) if rows is None else (n, rows)
        h = _zeros(data, [*lead, self.proj_size or self.hidden_size])
        return (h, _zeros(data, [*lead, self.hidden_size])) if self.mode == "LSTM" else h

    def zeros_of_cells(self: Any, x: Any, data: Any) -> Any:
        if data.dim() not in (1, 2):
            return None
        h = _zeros(data, [*data.shape[:-1], self.hidden_size])
        return (h, h) if isinstance(self, torch.nn.LSTMCell) else h

    def states(self: Any, x: Any, hx: Any, zeros: Any) -> Any:
        data = x.data if isinstance(x, packed) else x
        if not isinstance(data, lazy) or not _core.is_lazy(data):
            return hx
        if hx is None:
            return zeros(self, x, data)
        if isinstance(hx, (tuple, list)):
            return type(hx)(_recorded(h, data) for h in hx)
        return _recorded(hx, data)

    layers = torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM
    cells = torch.nn.RNNCell, torch.nn.GRUCell, torch.nn.LSTMCell
    for cls in layers + cells:
        original = cls.forward

        def wrap(original: Any, zeros: Any) -> Any:
            def forward(self, input, hx=None):  # type: ignore[no-untyped-def]
                if isinstance(input, packed) and isinstance(input.data, lazy):
                    result = recur(self, input, hx)
                    if result is not None:
                        return result
                return original(self, input, states(self, input, hx, zeros))

            # TorchScript unwraps a function to find its source, but takes the globals of the
            # wrapper. So the wrapper gets the globals of the original.
            at = original.__code__
            code = forward.__code__.replace(
                co_firstlineno=at.co_firstlineno, co_filename=at.co_filename
            )
            same = types.FunctionType(
                code, original.__globals__, "forward", (None,), forward.__closure__
            )
            for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
                setattr(same, name, getattr(original, name))
            same.__wrapped__ = original  # type: ignore[attr-defined]
            return same

        cls.forward = wrap(original, zeros_of_cells if cls in cells else zeros_of_layers)  # type: ignore[method-assign]


def _recorded(h: Any, like: torch.Tensor) -> Any:
    """A state as a value of the step of `like`."""
    if not isinstance(h, torch.Tensor) or h.layout is not torch.strided:
        return h
    if isinstance(h, LazyTensor) and not _core.is_concrete(h) and _core.settled(h) is None:
        return h
    return h - like.new_zeros(h.shape, dtype=h.dtype, device=h.device)


def _zeros(like: torch.Tensor, size: list[int]) -> torch.Tensor:
    """`like.new_zeros(size)` of a lazy tensor. Where nobody but koila would see the call it goes to
    koila at once: torch's way there takes longer than what is done there."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
        or torch.is_inference_mode_enabled()
    ):
        return like.new_zeros(size)
    as_torch_says_it = {"pin_memory": False}
    made: torch.Tensor = _core.dispatch(aten.new_zeros.default, (), (like, size), as_torch_says_it)
    return made


def _keep_leaves(real: torch.Tensor) -> None:
    """What was recorded from `real` keeps its contents, for the tensor is about to get others."""
    for tape in _core.tapes():
        for v, leaf in _core.leaves_on(tape):
            if leaf is real:
                with torch.no_grad():
                    _core.replace_leaf(tape, v, real.detach())


def _memory() -> None:
    """Functions that hand out memory without a version counter, see Note [Back doors] in
    watches.c."""

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        array = NUMPY(self, *args, **kwargs)
        _core.handed_out(self, array, True)
        return array

    to_dlpack = torch.Tensor.__dlpack__

    def dlpack(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        capsule = to_dlpack(self, *args, **kwargs)
        _core.handed_out(self, capsule, False)
        return capsule

    def storage(self: torch.Tensor) -> Any:
        memory = untyped_storage(self)
        _core.handed_out(self, memory, False)
        return memory

    for name, function in (("numpy", numpy), ("__dlpack__", dlpack), ("untyped_storage", storage)):
        original = getattr(torch.Tensor, name)
        function.__name__, function.__doc__ = name, original.__doc__
        function.__qualname__ = f"Tensor.{name}"
        setattr(torch.Tensor, name, function)


# Kernels that count no version of what they write, with those arguments. Gradients are written by
# the fused ones where there is a grad_scale.
_MOMENTS = {0: "self", 2: "exp_avgs", 3: "exp_avg_sqs", 4: "max_exp_avg_sqs"}
_UNCOUNTED = {
    "_foreach_zero_": {0: "self"},
    "_foreach_lerp_": {0: "self"},
    "_amp_foreach_non_finite_check_and_unscale_": {0: "self"},
    "_fused_adam_": _MOMENTS,
    "_fused_adamw_": _MOMENTS,
    "_fused_adagrad_": {0: "self", 2: "state_sums"},
    "_fused_sgd_": {0: "self", 2: "momentum_buffer_list"},
}


def _uncounted_writes() -> None:
    """What these write is told to the tapes, see Note [Back doors] in watches.c."""
    witness = torch.empty(0, device="cpu")

    def tell(written: list[torch.Tensor]) -> None:
        if not torch.compiler.is_compiling():
            _core.written(written, witness)
            count_write([witness])

    def telling(original: Any, places: dict[int, str]) -> Any:
        @functools.wraps(original)
        def write(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            scaled = {1: "grads"} if kwargs.get("grad_scale") is not None else {}
            lists = [
                args[i] if i < len(args) else kwargs.get(name) or ()
                for i, name in (places | scaled).items()
            ]
            tell([t for tensors in lists for t in tensors])
            return result

        return write

    for name, places in _UNCOUNTED.items():
        if hasattr(torch, name):
            setattr(torch, name, telling(getattr(torch, name), places))

    def by_elements(original: Any) -> Any:
        @functools.wraps(original)
        def write(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            finally:  # where the function of an element raised, some are written
                tell([self])

        return write

    for name in ("apply_", "map_", "map2_"):  # Python functions of each element
        setattr(torch.Tensor, name, by_elements(getattr(torch.Tensor, name)))


def _set_lazy_data(self: LazyTensor, value: torch.Tensor) -> None:
    if self._is_view() and self.requires_grad:
        raise UnsupportedError(
            "x.data = y of a lazy view that requires grad: its gradient would go on through the "
            "view. Set the data of a detach() of it, or write it with copy_()"
        )
    with torch.inference_mode(value.is_inference()):
        if _core.is_lazy(value):
            other = _core.record(aten.alias.default, (value.detach(),), {})
        else:
            _core.tape_open()
            other = _core.lazy_leaf(value.detach(), None, 0)
    set_data(self, other)
    _core.become(self, other)
