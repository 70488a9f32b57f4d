"""A slow, plain twin of capture and run, to judge placement alone: record a program with PyTorch's
own dispatch mode, hand the graph to the C core (through ctypes), and run what koila__place() or
koila__place_cut() says, slice by slice, with no schedule: every value's pieces are simply kept.

    recording = record(fn, inputs, batch_dims)        # fn(*inputs) -> tensors; runs eagerly, once
    placed = recording.place()
    placed.check(slices=[3, 1, 4])                    # every target: sliced == eager

Nothing here is fast, nothing is shared with the extension but the C core. That is the point: two
ways, one claim.
"""

from __future__ import annotations

import ctypes as C
import math
import os
import subprocess
import tempfile
import zlib
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# may be another tree, with planted faults
ROOT = Path(os.environ.get("KOILA_ORACLE_ROOT", Path(__file__).resolve().parents[2]))
NONE = 2**32 - 1


def build() -> C.CDLL:
    """The core as a shared library with every symbol visible, compiled when a source is newer."""
    sources = sorted((ROOT / "src").rglob("*.c"))
    inputs = [
        *sources,
        *(ROOT / "src").rglob("*.h"),
        *(ROOT / "src").rglob("*.def"),
        *(ROOT / "include/koila").glob("*.h"),
    ]
    key = os.getuid()
    out = (
        Path(tempfile.gettempdir()) / f"koila-oracle-{key}-{zlib.crc32(str(ROOT).encode()):08x}.so"
    )
    if not out.exists() or out.stat().st_mtime < max(p.stat().st_mtime for p in inputs):
        tmp = out.with_suffix(f".{os.getpid()}.tmp")
        flags = [
            "-std=gnu11",
            "-O0",
            "-g",
            "-shared",
            "-fPIC",
            "-D_GNU_SOURCE",
            "-DKOILA_DEBUG_LEVEL=2",
            f"-I{ROOT / 'include'}",
            f"-I{ROOT / 'src'}",
        ]
        subprocess.run(
            [
                os.environ.get("CC", "cc"),
                *flags,
                "-o",
                str(tmp),
                *map(str, sources),
                "-lm",
                "-lpthread",
            ],
            check=True,
        )
        tmp.replace(out)
    return C.CDLL(str(out))


lib = build()
u8, u16, u32, i64, u64, ptr = C.c_uint8, C.c_uint16, C.c_uint32, C.c_int64, C.c_uint64, C.c_void_p


class ArgU(C.Union):
    _fields_ = [("i", i64), ("f", C.c_double), ("id", u32)]


class Arg(C.Structure):
    _fields_ = [("kind", u8), ("n", u32), ("u", ArgU)]


class Link(C.Structure):
    _fields_ = [("sig", u32), ("output", u32)]


class Write(C.Structure):
    _fields_ = [("input", u32), ("overwrites", u8), ("n_links", u32), ("links", C.POINTER(Link))]


class Sig(C.Structure):
    _fields_ = [
        ("op", u32),
        ("n_tokens", u32),
        ("n_pos", u32),
        ("n_kw", u32),
        ("tokens", C.POINTER(Arg)),
        ("start", C.POINTER(u32)),
        ("kw_names", C.POINTER(u32)),
        ("n_inputs", u32),
        ("inputs", C.POINTER(u32)),
        ("n_fresh", u32),
        ("n_outputs", u32),
        ("outputs", C.POINTER(u32)),
        ("result_kind", u8),
        ("grad_mode", u8),
        ("n_writes", u32),
        ("writes", C.POINTER(Write)),
    ]


class Meta(C.Structure):
    _fields_ = [
        ("dtype", C.c_int),
        ("device", u16),
        ("n_dims", u8),
        ("size", C.POINTER(i64)),
        ("stride", C.POINTER(i64)),
        ("n_elements", u64),
        ("n_bytes", u64),
        ("n_storage_bytes", u64),
    ]


class NodeInfo(C.Structure):
    _fields_ = [("sig", u32), ("first_input", u32), ("first_output", u32), ("line", u32)]


class ValueInfo(C.Structure):
    _fields_ = [("meta", u32), ("node", u32), ("leaf_kind", u8), ("dim", u8), ("axis", u16)]


class Placement(C.Structure):
    _fields_ = [
        ("kind", u8),
        ("combine", u8),
        ("dim", u8),
        ("axis", u16),
        ("outer", i64),
        ("inner", i64),
    ]

    def key(self):
        return (self.kind, self.combine if self.kind == 2 else 0) + (
            (self.dim, self.outer, self.inner)
            if self.kind == 1
            else (self.outer, self.inner)
            if self.is_piece
            else ()
        )

    @property
    def is_piece(self):
        return self.kind == 2 and self.combine == 4

    def __repr__(self):
        o = f",{self.outer},{self.inner}" if (self.outer, self.inner) != (1, 1) else ""
        return [
            "R",
            f"S({self.dim}{o})",
            f"P({self.outer}..{self.inner})"
            if self.is_piece
            else "P(" + ["sum", "max", "min", "moments"][self.combine] + ")",
            "FREE",
        ][self.kind]


class Fix(C.Structure):
    _fields_ = [("kind", u8), ("arg", u8), ("output", u16)]


FIX = ["NONE", "SIZES", "STRIDES", "EXTENT", "ROWS", "SCALE", "ALIAS", "DIMS", "INDEX", "END"] + [
    "FIRST"
]


class PlacedLink(C.Structure):
    _fields_ = [("fix", Fix * 4), ("out", Placement)]


class PlacedNode(C.Structure):
    _fields_ = [
        ("fix", Fix * 4),
        ("link", C.POINTER(PlacedLink)),
        ("axis", u16),
        ("in_loop", u8),
        ("gathered", u8),
        ("recorded", u32),
        ("begin", i64),
        ("end", i64),
        ("joins", u8),
        ("sums", u8),
    ]


class Placed(C.Structure):
    # the fields after these are not read
    _fields_ = [
        ("graph", ptr),
        ("value", C.POINTER(Placement)),
        ("size", ptr),
        ("need", C.POINTER(Placement)),
        ("node", C.POINTER(PlacedNode)),
        ("lowered", C.POINTER(u32)),
        ("absent", C.POINTER(u8)),
        ("cut", C.POINTER(C.POINTER(i64))),
    ]


MISSING = object()  # a piece of another slice


class Error(C.Structure):
    _fields_ = [("struct_size", u32), ("code", C.c_int), ("offset", u64), ("text", C.c_char * 240)]


for name, res in {
    "koila_op_name": C.c_char_p,
    "koila_text": C.c_char_p,
    "koila_meta_get": C.POINTER(Meta),
    "koila_sig_get": C.POINTER(Sig),
    "koila_node_get": NodeInfo,
    "koila_value_get": ValueInfo,
    "koila_node_inputs": C.POINTER(u32),
    "koila_graph_n_nodes": u32,
    "koila_graph_n_values": u32,
    "koila_op_flags": u32,
    "koila__placed_check": C.c_bool,
    "koila_dtype_torch": C.c_char_p,
    "koila__op_line": C.c_bool,
    "koila__rule_of": ptr,
}.items():
    getattr(lib, name).restype = res

DTYPES = {
    getattr(torch, lib.koila_dtype_torch(i).decode()): i
    for i in range(18)
    if hasattr(torch, lib.koila_dtype_torch(i).decode())
}
DTYPE_OF = {v: k for k, v in DTYPES.items()}
VIEW, INPLACE, RANDOM, FACTORY, OPAQUE = 1, 2, 4, 8, 16


def ok(status: int, what: str = "") -> None:
    if status:
        raise RuntimeError(f"{what}: status {status}")


def op_lines() -> dict[str, tuple[str, str]]:
    """ops.def: operator with a rule -> (rule family, what it says)."""
    out, a, b, c, i = {}, C.c_char_p(), C.c_char_p(), C.c_char_p(), 0
    while lib.koila__op_line(u32(i), C.byref(a), C.byref(b), C.byref(c)):
        out[a.value.decode()] = (b.value.decode(), c.value.decode())
        i += 1
    return out


# ---- the table and the graph


class Graph:
    def __init__(self):
        self.table, self.graph = ptr(), ptr()
        ok(lib.koila_table_new(None, C.byref(self.table)))
        ok(lib.koila_graph_new(self.table, None, C.byref(self.graph)))
        self.objects: dict[int, object] = {}
        self.keep = []

    def out(self, fn, *args) -> int:
        x = u32()
        ok(fn(*args, C.byref(x)), fn.__name__ if hasattr(fn, "__name__") else "")
        return x.value

    def text(self, s: str) -> int:
        return self.out(lib.koila_table_text, self.table, s.encode())

    def meta(self, t: torch.Tensor | None) -> int:
        if t is None:
            return NONE
        size, stride = (i64 * max(t.dim(), 1))(*t.shape), (i64 * max(t.dim(), 1))(*t.stride())
        device = u16(0x100 + t.device.index if t.is_cuda else 0)
        return self.out(
            lib.koila_table_meta, self.table, DTYPES[t.dtype], device, u32(t.dim()), size, stride
        )

    def token(self, v) -> list[Arg]:
        a = Arg()
        if v is None:
            a.kind = 0
        elif isinstance(v, Slot):
            a.kind, a.u.id = 1, v.meta
        elif isinstance(v, bool):
            a.kind, a.u.i = 4, v
        elif isinstance(v, int):
            a.kind, a.u.i = 2, v
        elif isinstance(v, float):
            a.kind, a.u.f = 3, v
        elif isinstance(v, str):
            a.kind, a.u.id = 5, self.text(v)
        elif isinstance(v, torch.dtype):
            a.kind, a.u.id = 6, DTYPES[v]
        elif isinstance(v, (list, tuple, torch.Size)):
            a.kind, a.n = 8, len(v)
            return [a, *(t for e in v for t in self.token(e))]
        else:
            for k, o in self.objects.items():
                if type(o) is type(v) and o == v:
                    a.kind, a.u.id = 7, k
                    return [a]
            a.kind, a.u.id = 7, self.out(lib.koila_table_opaque, self.table, str(v).encode())
            self.objects[a.u.id] = v
        return [a]

    def sig(
        self, op: str, flags: int, args, kwargs, outs: list[int], result_kind: int, writes=()
    ) -> int:
        toks = [t for v in args for t in self.token(v)]
        kw = [self.text(k) for k in kwargs]
        toks += [t for v in kwargs.values() for t in self.token(v)]
        d = Sig()
        d.op = self.out(lib.koila_table_op, self.table, op.encode(), u32(flags))
        d.n_tokens, d.n_pos, d.n_kw = len(toks), len(args), len(kwargs)
        d.tokens, d.kw_names = (Arg * max(len(toks), 1))(*toks), (u32 * max(len(kw), 1))(*kw)
        d.n_fresh, d.outputs, d.result_kind, d.grad_mode = (
            len(outs),
            (u32 * max(len(outs), 1))(*outs),
            result_kind,
            1,
        )
        ws = [
            Write(i, o, len(ls), (Link * max(len(ls), 1))(*(Link(*link) for link in ls)))
            for i, o, ls in writes
        ]
        d.n_writes, d.writes = len(ws), (Write * max(len(ws), 1))(*ws)
        return self.out(lib.koila_table_sig, self.table, C.byref(d))

    def leaf(self, t, batch_dim=None, axis=0) -> int:
        return self.out(
            lib.koila_graph_leaf,
            self.graph,
            self.meta(t),
            C.c_int(batch_dim is not None),
            u16(axis),
            u32(batch_dim or 0),
            None,
        )

    def node(self, sig: int, ins: list[int]) -> int:
        return self.out(
            lib.koila_graph_node, self.graph, sig, (u32 * max(len(ins), 1))(*ins), u32(NONE)
        )

    def axis(self, n: int) -> int:
        x = u16()
        ok(lib.koila_graph_axis(self.graph, i64(n), C.byref(x)))
        return x.value


class Slot:
    """A tensor argument: its meta, and the value it reads."""

    def __init__(self, meta, value):
        self.meta, self.value = meta, value


class Group:
    """One storage: its base (a view that keeps the recorded sizes), newest version, and the views
    of this version replayed so far."""

    def __init__(self, base, meta, value):
        self.base, self.meta, self.value, self.gen, self.memo = base, meta, value, 0, {}


class Ref:
    def __init__(self, group, chain=(), value=None):
        self.group, self.chain, self.value, self.gen = group, chain, value, group.gen


OVERWRITES = {
    "copy_",
    "fill_",
    "zero_",
    "bernoulli_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "cauchy_",
}
LIKE = {
    "zeros_like": "zeros",
    "ones_like": "full",
    "full_like": "full",
    "rand_like": "rand",
    "randn_like": "randn",
    "empty_like": "empty_strided",
    "new_zeros": "zeros",
    "new_ones": "full",
    "new_full": "full",
    "new_empty": "empty.memory_format",
    "new_empty_strided": "empty_strided",
}


class Recorder(TorchDispatchMode):
    def __init__(self, g: Graph):
        super().__init__()
        self.g, self.refs, self.alive, self.reals, self.node_out = g, {}, [], [], {}
        self.is_drawing = False
        self.leaf_tensor: dict[int, torch.Tensor] = {}
        self.names = []

    # -- values of tensors
    def track(self, t, ref):
        self.refs[id(t)] = ref
        self.alive.append(t)

    def ref(self, t) -> Ref:
        r = self.refs.get(id(t))
        if r is None:
            v = self.g.leaf(t)
            self.leaf_tensor[v] = t.detach().clone() if t.layout == torch.strided else t
            r = Ref(Group(t, self.g.meta(t), v), (), v)
            self.track(t, r)
        return r

    def value(self, t) -> int:
        r = self.ref(t)
        if r.gen != r.group.gen or r.value is None:
            v, done = r.group.value, ()
            for sig, out, meta in r.chain:
                done += ((sig, out),)
                if done not in r.group.memo:
                    first = self.g.node(sig, [v])
                    r.group.memo[done] = first + out
                v = r.group.memo[done]
            r.value, r.gen = v, r.group.gen
        return r.value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name + (
            "." + func._schema.overload_name if func._schema.overload_name else ""
        )
        base_name = func._schema.name.split("::")[1]
        kwargs.pop("pin_memory", None)
        if kwargs.get("layout", 0) in (None, torch.strided):
            kwargs.pop("layout", None)
        if base_name in LIKE and func._schema.overload_name != "out":
            return self.like(base_name, func, args, kwargs)
        if base_name == "native_dropout" and args[0].numel() and not self.is_drawing:
            return self.dropout(*args[:2])
        if base_name in ("detach", "alias", "lift_fresh"):
            out = func(*args, **kwargs)
            r = self.ref(args[0])
            self.value(args[0])
            self.track(out, Ref(r.group, r.chain, r.value))
            self.refs[id(out)].gen = r.gen
            return out
        if base_name == "_local_scalar_dense" or base_name in ("equal", "is_same_size"):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self.write(func, name, base_name, args, kwargs)
        tensors, sargs, skw = self.slots(args, kwargs)
        out = func(*args, **kwargs)
        flat = (
            [out]
            if isinstance(out, torch.Tensor)
            else list(out)
            if isinstance(out, (tuple, list))
            else None
        )
        if flat is None:
            return out
        random = torch.Tag.nondeterministic_seeded in func.tags and not (
            base_name.startswith("_scaled_dot_product") and (args[3] if len(args) > 3 else 0) == 0
        )
        flags = (
            (VIEW if func.is_view else 0)
            | (RANDOM if random else 0)
            | (FACTORY if not tensors else 0)
        )
        if (
            not tensors
            and "dtype" not in skw
            and any(a.name == "dtype" for a in func._schema.arguments)
        ):
            skw["dtype"] = flat[0].dtype  # not the default dtype of whoever replays
        if not tensors and any(a.name == "device" for a in func._schema.arguments):
            skw["device"] = flat[0].device
        sig = self.g.sig(
            name,
            flags,
            sargs,
            skw,
            [self.g.meta(o) for o in flat],
            0 if isinstance(out, torch.Tensor) else 1 if isinstance(out, tuple) else 2,
        )
        first = self.g.node(sig, [s.value for s in tensors])
        self.names.append(name)
        if random:
            self.node_out[first] = [o.detach().clone() if o is not None else None for o in flat]
        for j, o in enumerate(flat):
            if o is None:
                continue
            if func.is_view and len(tensors) == 1:
                src = next(a for a in args if isinstance(a, torch.Tensor))
                r = self.ref(src)
                ref = Ref(r.group, r.chain + ((sig, j, None),), first + j)
                ref.gen = r.group.gen
                self.track(o, ref)
            elif id(o) in self.refs:
                raise NotImplementedError(f"{name} returns its argument")
            else:
                self.track(o, Ref(Group(o, self.g.meta(o), first + j), (), first + j))
        return out

    def dropout(self, x, p):
        """A GPU's dropout: its mask is drawn of an empty tensor, as capture records it."""
        with self:
            like = torch.empty_like(x)
            self.is_drawing = True
            try:
                mask = torch.ops.aten.native_dropout(like, p, True)[1]
            finally:
                self.is_drawing = False
            return x * mask * (1 / (1 - p)), mask

    def like(self, base_name, func, args, kwargs):
        out = func(*args, **kwargs)
        new = LIKE[base_name]
        size = list(out.shape)
        a = {
            "zeros": [size],
            "rand": [size],
            "randn": [size],
            "empty.memory_format": [size],
            "empty_strided": [size, list(out.stride())],
            "full": [size, args[-1] if "full" in base_name else 1],
        }[new]
        if isinstance(a[-1], torch.Tensor):
            a[-1] = a[-1].item()
        sig = self.g.sig(
            "aten::" + new,
            FACTORY | (RANDOM if "rand" in new else 0),
            a,
            {"dtype": out.dtype, "device": out.device},
            [self.g.meta(out)],
            0,
        )
        v = self.g.node(sig, [])
        if "rand" in new:
            self.node_out[v] = [out.clone()]
        self.track(out, Ref(Group(out, self.g.meta(out), v), (), v))
        return out

    def slots(self, args, kwargs, written=()):
        tensors = []

        def slot(v):
            if isinstance(v, torch.Tensor):
                if any(v is w for w in written):
                    s = Slot(self.ref(v).group.meta, self.ref(v).group.value)
                else:
                    s = Slot(self.g.meta(v), self.value(v))
                tensors.append(s)
                return s
            return [slot(e) for e in v] if isinstance(v, (list, tuple)) else v

        return tensors, [slot(a) for a in args], {k: slot(v) for k, v in kwargs.items()}

    # aten::t_ -> aten::t, aten::transpose_ -> aten::transpose.int
    def turn(self, func, name, args, kwargs):
        """t_, squeeze_, ...: the functional twin is one more view of the same storage."""
        x, r = args[0], self.ref(args[0])
        tensors, sargs, skw = self.slots(args, kwargs)
        func(*args, **kwargs)
        sig = self.g.sig(
            {
                "aten::transpose_": "aten::transpose.int",
                "aten::squeeze_.dim": "aten::squeeze.dim",
            }.get(name, name[:-1]),
            VIEW,
            sargs,
            skw,
            [self.g.meta(x)],
            0,
        )
        v = self.g.node(sig, [tensors[0].value])
        ref = Ref(r.group, r.chain + ((sig, 0, None),), v)
        ref.gen = r.group.gen
        self.refs[id(x)] = ref
        return x

    def write(self, func, name, base_name, args, kwargs):
        if torch.Tag.inplace_view in func.tags:
            return self.turn(func, name, args, kwargs)
        written = []
        for k, a in enumerate(func._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                v = kwargs.get(a.name) if a.kwarg_only else args[k] if k < len(args) else None
                if isinstance(v, torch.Tensor):
                    written.append(v)
        for w in written:
            self.ref(w)
        tensors, sargs, skw = self.slots(args, kwargs, written)
        before = {id(w) for w in written}
        out = func(*args, **kwargs)
        fresh = (
            []
            if out is None
            else [
                o for o in ([out] if isinstance(out, torch.Tensor) else out) if id(o) not in before
            ]
        )
        ws = []
        flat = [
            v
            for v in (*args, *kwargs.values())
            for v in (v if isinstance(v, (list, tuple)) else [v])
            if isinstance(v, torch.Tensor)
        ]
        for w in written:
            r = self.ref(w)
            i = next(k for k, v in enumerate(flat) if v is w)
            ws.append(
                (i, int(base_name in OVERWRITES and not r.chain), [(s, o) for s, o, _ in r.chain])
            )
        random = torch.Tag.nondeterministic_seeded in func.tags
        sig = self.g.sig(
            name,
            INPLACE | (RANDOM if random else 0),
            sargs,
            skw,
            [self.g.meta(o) for o in fresh],
            3 if not fresh else 1,
            ws,
        )
        first = self.g.node(sig, [s.value for s in tensors])
        self.names.append(name)
        for j, o in enumerate(fresh):
            self.track(o, Ref(Group(o, self.g.meta(o), first + j), (), first + j))
        for k, w in enumerate(written):
            grp = self.ref(w).group
            grp.value, grp.gen, grp.memo = first + len(fresh) + k, grp.gen + 1, {}
            if random:
                self.node_out.setdefault(first, []).append(grp.base.detach().clone())
        return out


class Recording:
    def __init__(self, fn, inputs, batch_dims, axes=None):
        """batch_dims: one per input, None = not batched. axes: the axis of each input; all 0 when
        left out."""
        self.g = Graph()
        self.rec = Recorder(self.g)
        axes = axes or [0] * len(inputs)
        self.batches = [
            next(
                x.shape[d] for x, d, a in zip(inputs, batch_dims, axes) if d is not None and a == k
            )
            for k in range(max(axes, default=0) + 1)
        ]
        self.batch = self.batches[0]
        for n in self.batches:
            self.g.axis(n)
        for x, d, a in zip(inputs, batch_dims, axes):
            if isinstance(x, torch.Tensor):
                v = self.g.leaf(x, d, a)
                self.rec.leaf_tensor[v] = x.detach().clone()
                self.rec.track(x, Ref(Group(x, self.g.meta(x), v), (), v))
        # Capture records cuDNN's normalisations as PyTorch's own.
        with self.rec, torch.backends.cudnn.flags(enabled=False):
            outs = fn(*inputs)
            self.outs = [
                o
                for o in ([outs] if isinstance(outs, torch.Tensor) else outs)
                if isinstance(o, torch.Tensor)
            ]
            self.targets = [self.rec.value(o) for o in self.outs]
        self.outs = [o.detach().clone() for o in self.outs]

    def place(self, how="koila__place") -> Run:
        return Run(self, how)


def record(fn, inputs, batch_dims=None, axes=None) -> Recording:
    return Recording(fn, list(inputs), batch_dims or [0] * len(inputs), axes)


# ---- running


def take(x: torch.Tensor, p: Placement, s: int, e: int, batch: int) -> torch.Tensor:
    """Rows s..e of whole x placed p. A dense value stays dense: kernels that read strides wrongly
    (recurrent layers, statistics in backward) never see others in a whole run."""
    if p.outer == 0 or p.inner == 0:
        return x
    rows = (
        x.unflatten(p.dim, (p.outer, batch, p.inner))
        .narrow(p.dim + 1, s, e - s)
        .flatten(p.dim, p.dim + 2)
    )
    if not is_dense(x) or is_dense(rows):
        return rows
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    return torch.empty_permuted(rows.shape, order, dtype=x.dtype, device=x.device).copy_(rows)


def is_dense(x: torch.Tensor) -> bool:
    return x.numel() == 0 or x.numel() == 1 + sum(
        (n - 1) * st for n, st in zip(x.shape, x.stride())
    )


def put_together(parts, p: Placement, sizes):
    if p.outer == 0 or p.inner == 0:
        return parts[0]
    split = [x.unflatten(p.dim, (p.outer, b, p.inner)) for x, b in zip(parts, sizes)]
    return torch.cat(split, p.dim + 1).flatten(p.dim, p.dim + 2)


def combine(parts, p: Placement):
    acc = parts[0]
    for x in parts[1:]:
        if p.combine == 0:
            acc = acc + x
        elif p.combine == 1:
            acc = torch.maximum(acc, x)
        elif p.combine == 2:
            acc = torch.minimum(acc, x)
        else:
            n, d = acc[0] + x[0], x[1] - acc[1]
            acc = torch.stack([n, acc[1] + d * x[0] / n, acc[2] + x[2] + d * d * acc[0] * x[0] / n])
    return acc


def moments(x, dims):
    wide = (
        torch.float32
        if x.dtype in (torch.float16, torch.bfloat16)
        else torch.float64
        if x.dtype is torch.float32
        else x.dtype
    )
    x = x.to(wide)
    n = 1
    for d in dims:
        n *= x.size(d)
    v, m = torch.var_mean(x, dims, correction=0)
    return torch.stack([torch.full_like(m, n), m, v * n])


def own_row(x, dim, n_dims):
    """The number of each row of x, along dimension `dim` of `n_dims`."""
    numbers = torch.arange(x.size(0), device=x.device)
    return numbers.view([-1 if k == dim else 1 for k in range(n_dims)])


def index_rows(x, dim, n_dims, indices):
    return torch.ops.aten.index(x, [own_row(x, dim, n_dims), *indices])


def index_put_rows(x, dim, n_dims, indices, values, accumulate):
    return torch.ops.aten.index_put(
        x,
        [own_row(x, dim, n_dims), *indices],
        values,
        accumulate,
    )


def scores_of(q, k, bias, first, is_causal, scale):
    scores = q @ k.transpose(-1, -2) * (q.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        queries = torch.arange(first, first + q.size(2), device=q.device)
        seen = queries[:, None] >= torch.arange(k.size(2), device=q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores if bias is None else scores + bias


def query_rows(q, k, v, bias, first, kernel, is_causal, scale, with_sums):
    assert kernel == 0
    scores = scores_of(q, k, bias, first, is_causal, scale)
    out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    return out.copy_(scores.softmax(-1) @ v), scores.logsumexp(-1)


def query_rows_backward(grad, q, k, v, bias, out, sums, first, kernel, is_causal, scale):
    share = (scores_of(q, k, bias, first, is_causal, scale) - sums[..., None]).exp()
    by_score = share * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    by_score = by_score * (q.size(-1) ** -0.5 if scale is None else scale)
    gradients = by_score @ k, by_score.transpose(-1, -2) @ q, share.transpose(-1, -2) @ grad
    return [torch.empty_like(t).copy_(g) for t, g in zip((q, k, v), gradients)]


def conv_rows(x, weight, bias, *numbers):
    *window, dim, first, n = numbers
    return torch.convolution(x, weight, bias, *window).narrow(dim, first, n)


def conv_rows_weight(small, large, weight, stride, padding, dilation, groups, dim, first):
    none = [0] * len(stride)
    window = stride, padding, dilation, False, none, groups
    whole = torch.zeros_like(torch.convolution(large, weight, None, *window))
    whole.narrow(dim, first, small.shape[dim]).copy_(small)
    backward = torch.ops.aten.convolution_backward
    return backward(whole, large, weight, None, *window, [False, True, False])[1]


def whole_of(rows, dim, begin, n):
    """Zeros around the rows that a slice was given."""
    whole = rows.new_zeros([n if d == dim else s for d, s in enumerate(rows.shape)])
    whole.narrow(dim, begin, rows.shape[dim]).copy_(rows)
    return whole


def max_pool_rows(x, kernel, stride, padding, dilation, ceil_mode, size, dim, begin, first, n):
    call = getattr(torch.ops.aten, f"max_pool{len(kernel)}d_with_indices")
    made = call(whole_of(x, dim, begin, size), kernel, stride, padding, dilation, ceil_mode)
    return [t.narrow(dim, first, n) for t in made]


def max_pool_rows_backward(grad, indices, *numbers):
    kernel, stride, padding, dilation, sizes, dim, begin, first, n = numbers
    n_outer = grad.dim() - len(kernel)
    whole = grad.new_zeros(*grad.shape[:n_outer], math.prod(sizes))
    whole.scatter_add_(-1, indices.flatten(n_outer), grad.flatten(n_outer))
    return whole.unflatten(-1, sizes).narrow(dim, first, n)


def avg_pool_rows(x, *numbers):
    *window, dim, begin, first, n = numbers
    call = getattr(torch.ops.aten, f"avg_pool{len(window[0])}d")
    return call(x, *window).narrow(dim, first, n)


def avg_pool_rows_backward(grad, *numbers):
    *window, sizes, dim, begin, first, n = numbers
    like = grad.new_zeros(*grad.shape[: grad.dim() - len(sizes)], *sizes)
    call = getattr(torch.ops.aten, f"avg_pool{len(sizes)}d_backward")
    return call(grad, like, *window).narrow(dim, first, n)


def resampling(mode, align, scales):
    linear = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"]
    n = len(scales)
    name = [f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d", linear[n - 1]][mode]
    return name, ([align] if mode == 2 else []) + list(scales)


def resample_rows(x, sizes, made, mode, align, dim, begin, first, n, *scales):
    name, options = resampling(mode, align, scales)
    x = whole_of(x, dim, begin, sizes[dim - 2])
    return getattr(torch.ops.aten, name)(x, made, *options).narrow(dim, first, n)


def resample_rows_backward(grad, sizes, made, mode, align, dim, begin, first, n, *scales):
    name, options = resampling(mode, align, scales)
    grad = whole_of(grad, dim, begin, made[dim - 2])
    before = [*grad.shape[:2], *sizes]
    call = getattr(torch.ops.aten, name + "_backward")
    return call(grad, made, before, *options).narrow(dim, first, n)


def padding(x, pad, mode, value):
    if mode == 0:
        return torch.constant_pad_nd(x, pad, value)
    return torch.nn.functional.pad(x, pad, ["reflect", "replicate"][mode - 1])


def pad_rows(x, pad, mode, value, dim, first, n):
    return padding(x, pad, mode, value).narrow(dim, first, n)


def pad_rows_backward(grad, pad, mode, dim, first, n):
    x = grad.new_zeros(
        [s - sum(pad[2 * d : 2 * d + 2]) for d, s in zip(range(grad.dim())[::-1], grad.shape)]
    )
    name = ["reflection", "replication"][mode - 1]
    call = getattr(torch.ops.aten, f"{name}_pad{len(pad) // 2}d_backward")
    return call(grad, x, pad).narrow(dim, first, n)


def laid_out(x, dims):
    return torch.empty_permuted(x.shape, dims, dtype=x.dtype, device=x.device).copy_(x)


def embedding_bag(weight, indices, step, mode, weights, padding, trains):
    call = torch.ops.aten._embedding_bag if trains else torch.ops.aten._embedding_bag_forward_only
    return call(
        weight,
        indices,
        torch.arange(0, len(indices), step, device=indices.device),
        False,
        mode,
        False,
        weights,
        False,
        padding,
    )


def embedding_bag_backward(grad, indices, step, sizes, most, n, mode, weights, padding):
    offsets = torch.arange(0, indices.numel(), step, device=indices.device)
    none = torch.empty(0, dtype=torch.long, device=indices.device)
    return torch.ops.aten._embedding_bag_backward(
        grad,
        indices,
        offsets,
        none,
        none if sizes is None else sizes,
        none if most is None else most,
        n,
        False,
        mode,
        False,
        weights,
        padding,
    )


def embedding_bag_weights_backward(grad, weight, indices, step, mode, padding):
    products = (weight[indices].unflatten(0, (-1, step)) * grad.unsqueeze(1)).sum(2).flatten()
    return products.masked_fill(indices == padding, 0)


PSEUDO = {
    "koila::moments": moments,
    "koila::index_rows": index_rows,
    "koila::index_put_rows": index_put_rows,
    "koila::laid_out": laid_out,
    "koila::embedding_bag": embedding_bag,
    "koila::embedding_bag_backward": embedding_bag_backward,
    "koila::embedding_bag_weights_backward": embedding_bag_weights_backward,
    "koila::conv_rows": conv_rows,
    "koila::conv_rows_weight": conv_rows_weight,
    "koila::max_pool_rows": max_pool_rows,
    "koila::max_pool_rows_backward": max_pool_rows_backward,
    "koila::avg_pool_rows": avg_pool_rows,
    "koila::avg_pool_rows_backward": avg_pool_rows_backward,
    "koila::resample_rows": resample_rows,
    "koila::resample_rows_backward": resample_rows_backward,
    "koila::pad_rows": pad_rows,
    "koila::pad_rows_backward": pad_rows_backward,
    "koila::query_rows": query_rows,
    "koila::query_rows_backward": query_rows_backward,
}


class Run:
    """What koila__place, koila__place_cut or koila__place_whole said, run slowly."""

    def __init__(self, recording: Recording, how="koila__place"):
        self.r = r = recording
        self.p = C.POINTER(Placed)()
        err = Error(C.sizeof(Error))
        t = (u32 * max(len(r.targets), 1))(*r.targets)
        if getattr(lib, how)(
            r.g.graph, t, u32(len(r.targets)), None, C.byref(self.p), C.byref(err)
        ):
            raise RuntimeError(err.text.decode())
        if not lib.koila__placed_check(self.p, C.byref(err)):
            raise AssertionError(err.text.decode())
        self.graph = ptr(self.p.contents.graph)
        self.n_nodes, self.n_values = (
            lib.koila_graph_n_nodes(self.graph),
            lib.koila_graph_n_values(self.graph),
        )
        self.recorded_of = {}
        n_recorded = lib.koila_graph_n_values(r.g.graph)
        for v in range(n_recorded):
            if self.p.contents.lowered[v] != NONE:
                self.recorded_of.setdefault(self.p.contents.lowered[v], v)

    def close(self):
        if self.p:
            lib.koila__placed_free(self.p)
            self.p = None

    def node(self, n):
        info = lib.koila_node_get(self.graph, u32(n))
        sig = lib.koila_sig_get(self.r.g.table, u32(info.sig)).contents
        ins = lib.koila_node_inputs(self.graph, u32(n))
        return (
            info,
            sig,
            [ins[i] for i in range(sig.n_inputs)],
            lib.koila_op_name(self.r.g.table, u32(sig.op)).decode(),
        )

    def size_of(self, v):
        m = lib.koila_value_get(self.graph, u32(v)).meta
        if m == NONE:
            return None
        m = lib.koila_meta_get(self.r.g.table, u32(m)).contents
        return tuple(m.size[d] for d in range(m.n_dims))

    def gathers(self, least=0):
        """(op, shapes of the gathered inputs) of nodes that gather more than `least` elements."""
        out = []
        for n in range(self.n_nodes):
            if not self.p.contents.node[n].gathered:
                continue
            info, sig, ins, name = self.node(n)
            big = [
                self.size_of(v)
                for i, v in enumerate(ins)
                if self.p.contents.need[info.first_input + i].kind == 0
                and self.p.contents.value[v].kind == 1
            ]
            if any(torch.Size(s).numel() > least for s in big):
                out.append((name, big))
        return out

    def table(self):
        rows = []
        for n in range(self.n_nodes):
            info, sig, ins, name = self.node(n)
            needs = [
                f"{self.p.contents.value[v]!r}->{self.p.contents.need[info.first_input + i]!r}"
                for i, v in enumerate(ins)
            ]
            outs = [
                f"{self.p.contents.value[v]!r}{list(self.size_of(v) or [])}"
                for v in range(info.first_output, info.first_output + sig.n_outputs)
            ]
            placed = self.p.contents.node[n]
            flags = ("G" if placed.gathered else " ") + ("L" if placed.in_loop else " ")
            rows.append(f"{n:4} {flags} {name:50} {', '.join(needs)}  =>  {', '.join(outs)}")
        return "\n".join(rows)

    def decode(self, sig, tensors):
        """positional and keyword arguments; tensors in order of the TENSOR tokens"""
        it = iter(tensors)
        at = 0

        def one():
            nonlocal at
            a = sig.tokens[at]
            at += 1
            if a.kind == 8:
                return [x for x in [one() for _ in range(a.n)] if x is not MISSING]
            return {
                0: lambda: None,
                1: lambda: next(it),
                2: lambda: a.u.i,
                3: lambda: a.u.f,
                4: lambda: bool(a.u.i),
                5: lambda: lib.koila_text(self.r.g.table, u32(a.u.id)).decode(),
                6: lambda: DTYPE_OF[a.u.id],
                7: lambda: self.r.g.objects[a.u.id],
            }[a.kind]()

        pos = [one() for _ in range(sig.n_pos)]
        kw = {
            lib.koila_text(self.r.g.table, u32(sig.kw_names[k])).decode(): one()
            for k in range(sig.n_kw)
        }
        return pos, kw

    @staticmethod
    def func(name):
        if name in PSEUDO:
            return PSEUDO[name]
        ns, rest = name.split("::")
        op, _, overload = rest.partition(".")
        return getattr(getattr(getattr(torch.ops, ns), op), overload or "default")

    def call(self, sig, name, tensors, fixes, outs, needs, b, metas_in, batch, start=0):
        """One call on a slice of b of `batch` rows from row `start` (b None: whole)."""
        pos, kw = self.decode(sig, tensors)
        scale = []
        if b is not None:
            for f in fixes:
                if f.kind == 0:
                    break
                kind = FIX[f.kind]
                if kind == "ALIAS":
                    return [tensors[0]]
                if kind in ("SIZES", "STRIDES", "EXTENT"):
                    p = outs[f.output] if f.output < 1000 else needs[f.output - 1000]
                    ext = p.outer * b * p.inner
                    if kind == "SIZES" and p.kind == 1:
                        if pos[f.arg][p.dim] != -1:
                            pos[f.arg][p.dim] = ext
                    elif kind == "STRIDES" and p.kind == 1:
                        sizes, order = (
                            pos[f.arg - 1],
                            sorted(range(len(pos[f.arg])), key=lambda d: (pos[f.arg][d], -d)),
                        )
                        st, step = list(pos[f.arg]), 1
                        for d in order:
                            st[d], step = step, step * max(sizes[d], 1)
                        pos[f.arg] = st
                    elif kind == "EXTENT" and p.kind == 1:
                        pos[f.arg] = ext
                elif kind == "ROWS":
                    pos[f.arg] = (
                        [x // batch * b for x in pos[f.arg]]
                        if isinstance(pos[f.arg], list)
                        else pos[f.arg] // batch * b
                    )
                elif kind in ("INDEX", "END"):
                    of_output = f.output < 1000
                    p = outs[f.output] if of_output else needs[f.output - 1000]
                    meta = sig.outputs[f.output] if of_output else sig.inputs[f.output - 1000]
                    n = self.meta_size(meta)[p.dim]
                    rows = torch.arange(n).view(p.outer, batch, p.inner)
                    here = rows[:, start : start + b].flatten().tolist()
                    first = pos[f.arg] % n if kind == "INDEX" else (pos[f.arg] - 1) % n
                    pos[f.arg] = here.index(first) + (kind == "END")
                elif kind == "FIRST":
                    p = outs[f.output] if f.output < 1000 else needs[f.output - 1000]
                    assert p.outer == 1
                    pos[f.arg] = start * p.inner
                elif kind == "SCALE":
                    scale.append(f.output)
                elif kind == "DIMS":
                    m = metas_in[0]
                    named = (
                        range(len(m))
                        if len(pos) == 1
                        else [
                            d % max(len(m), 1)
                            for d in (pos[1] if isinstance(pos[1], list) else [pos[1]])
                        ]
                    )
                    return [torch.ops.aten.squeeze.dims(pos[0], [d for d in named if m[d] == 1])]
        if name in ("aten::view", "aten::_unsafe_view"):
            out = pos[0].reshape(pos[1])
        elif name == "aten::as_strided":
            # of memory as it was recorded, counted from its first element: as the executor does
            m = lib.koila_meta_get(self.r.g.table, u32(sig.inputs[0])).contents
            base, strides = pos[0], [m.stride[d] for d in range(m.n_dims)]
            if any(n > 1 and a != b for n, a, b in zip(base.shape, base.stride(), strides)):
                base = torch.empty_strided(
                    base.shape, strides, dtype=base.dtype, device=base.device
                ).copy_(base)
            out = base.as_strided(
                pos[1], pos[2], base.storage_offset() + (pos[3] if len(pos) > 3 and pos[3] else 0)
            )
        else:
            out = self.func(name)(*pos, **kw)
        out = [out] if isinstance(out, torch.Tensor) or out is None else list(out)
        for j in scale:
            out[j] = out[j] * (b / batch)
        return out

    def run(self, rows: list[int], *more: list[int]) -> list[torch.Tensor]:
        """Targets, with slices of the given lengths (they add up to the batch), for each axis."""
        lengths = [rows, *more]
        assert [sum(r) for r in lengths] == self.r.batches
        cuts = [[(sum(r[:k]), sum(r[:k]) + n) for k, n in enumerate(r)] for r in lengths]
        p = self.p.contents
        for x in range(len(cuts)):  # no slice ends within a piece
            if p.cut and p.cut[x]:
                ends = sorted({p.cut[x][e] for _, e in cuts[x]} - {0})
                cuts[x] = list(zip([0, *ends[:-1]], ends))
        lengths = [[e - s for s, e in c] for c in cuts]
        store: dict[object, object] = {}  # value -> whole tensor (R) or list of pieces

        def whole(v):
            q = p.value[v]
            if q.kind == 0:
                return store[v]
            key = ("whole", v)
            if key not in store:
                if q.is_piece:
                    (store[key],) = (x for x in store[v] if x is not MISSING)
                    return store[key]
                parts = [local(v, k, e - s) for k, (s, e) in enumerate(cuts[q.axis])]
                store[key] = (
                    put_together(parts, q, lengths[q.axis]) if q.kind == 1 else combine(parts, q)
                )
            return store[key]

        def local(v, k, b):
            """Value v in slice k of b rows; zeros where it is absent."""
            if store[v][k] is not MISSING:
                return store[v][k]
            assert p.absent[v], f"value {v} is absent in slice {k}"
            q, size = p.value[v], list(self.size_of(v))
            if q.kind == 1:
                size[q.dim] = q.outer * b * q.inner
            return self.absent(next(x for x in store[v] if x is not MISSING), size)

        for v in range(self.n_values):
            info = lib.koila_value_get(self.graph, u32(v))
            if info.node == NONE:
                t = self.r.rec.leaf_tensor[self.recorded_of[v]]
                q = p.value[v]
                store[v] = (
                    t
                    if q.kind == 0
                    else [take(t, q, s, e, self.r.batches[q.axis]) for s, e in cuts[q.axis]]
                )
        # as the executor does: the grad mode of capture, below autograd
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.enable_grad(),
        ):
            for n in range(self.n_nodes):
                info, sig, ins, name = self.node(n)
                node = p.node[n]
                outs = [p.value[info.first_output + j] for j in range(sig.n_outputs)]
                needs = [p.need[info.first_input + i] for i in range(sig.n_inputs)]
                sizes_in = [self.size_of(v) for v in ins]
                flags = lib.koila_op_flags(self.r.g.table, u32(sig.op))
                loop, batch = (
                    cuts[node.axis] if node.in_loop else [(0, None)],
                    self.r.batches[node.axis],
                )
                results = []

                def runs(s, e):
                    return not node.end or (s <= node.begin and node.end <= e)

                if flags & RANDOM:
                    whole_out = self.r.rec.node_out[self.recorded_of[info.first_output]]
                    for s, e in loop:
                        results.append(
                            [
                                take(o, q, s, e, batch).clone() if q.kind == 1 else o
                                for o, q in zip(whole_out, outs)
                            ]
                            if not node.in_loop or runs(s, e)
                            else [MISSING] * sig.n_outputs
                        )
                else:
                    for k, (s, e) in enumerate(loop):
                        if node.in_loop and not runs(s, e):
                            results.append([MISSING] * sig.n_outputs)
                            continue
                        tensors = []
                        for i, v in enumerate(ins):
                            q = needs[i]
                            if q.kind == 0:
                                t = whole(v)
                            elif p.value[v].kind == 0:
                                t = take(whole(v), q, s, e, batch)
                            elif node.joins:
                                t = store[v][k]
                            else:
                                t = local(v, k, e - s)
                            tensors.append(t)
                        results.append(
                            self.one(
                                sig,
                                name,
                                tensors,
                                node,
                                outs,
                                needs,
                                e - s if node.in_loop else None,
                                sizes_in,
                                batch,
                                s,
                            )
                        )
                for j in range(sig.n_outputs):
                    v = info.first_output + j
                    if sig.outputs[j] == NONE:
                        continue
                    pieces = [r[j] for r in results]
                    self.check_piece(n, name, v, pieces, outs[j], loop)
                    store[v] = pieces if node.in_loop else pieces[0]
        return [whole(p.lowered[t]) for t in self.r.targets]

    @staticmethod
    def absent(like, size):
        return like.new_zeros(size)

    def check_piece(self, n, name, v, pieces, q, cuts):
        size = self.size_of(v)
        for x, (s, e) in zip(pieces, cuts):
            want = list(size)
            if q.kind == 1:
                want[q.dim] = q.outer * (e - s) * q.inner
            if x is None or x is MISSING or (q.outer * q.inner == 0 and q.kind == 1):
                continue
            assert list(x.shape) == want, (
                f"node {n} {name}: a slice of {e - s} rows is {list(x.shape)}, placement {q!r} "
                f"says {want}"
            )

    def one(self, sig, name, tensors, node, outs, needs, b, sizes_in, batch, start):
        if not sig.n_writes:
            return self.call(sig, name, tensors, node.fix, outs, needs, b, sizes_in, batch, start)
        tensors, bases, at = list(tensors), [], 0
        for w in range(sig.n_writes):
            wr = sig.writes[w]
            base = tensors[wr.input]
            size = list(self.meta_size(sig.inputs[wr.input]))
            q = outs[sig.n_fresh + w]
            if b is not None and q.kind == 1:
                size[q.dim] = q.outer * b * q.inner
            base = base.new_empty(size) if wr.overwrites else base.clone()
            bases.append(base)
            view = base
            for k in range(wr.n_links):
                ls = lib.koila_sig_get(self.r.g.table, u32(wr.links[k].sig)).contents
                lname = lib.koila_op_name(self.r.g.table, u32(ls.op)).decode()
                fix, lout = (
                    (node.link[at].fix, node.link[at].out)
                    if b is not None and node.link
                    else ((), Placement())
                )
                louts = [lout] * ls.n_outputs
                view = self.call(
                    ls, lname, [view], fix, louts, [lout], b, [self.meta_size(ls.inputs[0])], batch
                )[wr.links[k].output]
                at += 1
            tensors[wr.input] = view
        pos, kw = self.decode(sig, tensors)
        out = self.func(name)(*pos, **kw)
        fresh = (
            []
            if not sig.n_fresh
            else [o for o in ([out] if isinstance(out, torch.Tensor) else out)][: sig.n_fresh]
        )
        return fresh + bases

    def meta_size(self, meta):
        m = lib.koila_meta_get(self.r.g.table, u32(meta)).contents
        return tuple(m.size[d] for d in range(m.n_dims))

    def check(self, slices, atol=1e-11, rtol=1e-11, loose=True):
        """Every target, sliced, equals the recorded one (`loose`: the tolerance is float64's,
        others are scaled). Returns the largest relative difference."""
        worst = 0.0
        for rows in slices:
            got = self.run(*(rows if isinstance(rows[0], list) else [rows]))
            for k, (a, b) in enumerate(zip(got, self.r.outs)):
                a, b = a.detach(), b.detach()
                q = self.p.contents.value[self.p.contents.lowered[self.r.targets[k]]]
                if q.kind == 1 and q.outer * q.inner == 0:
                    continue  # opaque: a workspace
                assert a.shape == b.shape and a.dtype == b.dtype, (
                    f"target {k}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
                )
                if not b.dtype.is_floating_point and not b.dtype.is_complex:
                    assert torch.equal(a, b), f"target {k} differs with slices {rows}"
                    continue
                more = (
                    1.0
                    if not loose or b.dtype in (torch.float64, torch.complex128)
                    else 1e6
                    if b.dtype in (torch.float32, torch.complex64)
                    else 1e9
                )
                torch.testing.assert_close(
                    a,
                    b,
                    atol=atol * more,
                    rtol=rtol * more,
                    equal_nan=True,
                    msg=lambda m: f"target {k}, slices {rows}: {m}",
                )
                if b.numel() and b.isfinite().all():
                    worst = max(
                        worst, ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
                    )
        return worst
