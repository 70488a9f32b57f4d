"""simulated == slow model, event for event, on random histories; and each planted fault is seen.

Run alone for the long version:
    python tests/oracle/test_cache_oracle.py LIBKOILA.so [histories per configuration]
Under pytest a short version runs when KOILA_LIB names libkoila.so.
"""

import ctypes as C
import os
import random
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from cache_model import FAULTS, INF, MIB, Cache


class Config(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("torch_version", C.c_uint32),
        ("rules", C.c_uint32),
        ("verified", C.c_char_p),
        ("total_bytes", C.c_uint64),
        ("outside_bytes", C.c_uint64),
        ("cap_bytes", C.c_uint64),
        ("device_bytes", C.c_uint64),
        ("first_address", C.c_uint64),
        ("max_split_bytes", C.c_uint64),
        ("max_non_split_rounding_bytes", C.c_uint64),
        ("large_segment_bytes", C.c_uint64),
        ("gc_threshold", C.c_double),
        ("memory_fraction", C.c_double),
        ("divisions", C.c_uint32 * 16),
        ("rounding_set", C.c_uint8),
        ("expandable", C.c_uint8),
        ("oom_reject", C.c_uint8),
        ("release_lock", C.c_uint8),
        ("completion", C.c_uint8),
    ]


class Pool(C.Structure):
    _fields_ = [("owner", C.c_uint64), ("id", C.c_uint64)]


class Event(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("kind", C.c_int),
        ("addr", C.c_uint64),
        ("size", C.c_uint64),
        ("stream", C.c_uint64),
        ("pool", Pool),
    ]


EVENT_FN = C.CFUNCTYPE(None, C.c_void_p, C.POINTER(Event))


class Counter(C.Structure):
    _fields_ = [
        ("current", C.c_uint64),
        ("peak", C.c_uint64),
        ("allocated", C.c_uint64),
        ("freed", C.c_uint64),
    ]


class Stat(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("of", (Counter * 3) * 9),
        ("oversize_allocations", Counter),
        ("oversize_segments", Counter),
        ("num_alloc_retries", C.c_uint64),
        ("num_ooms", C.c_uint64),
        ("rest", C.c_uint64 * 7),
    ]


class Native:
    """koila_cache through ctypes, with the model's interface."""

    def __init__(
        self,
        lib,
        *,
        total=0,
        cap=0,
        max_split=INF,
        rounding=None,
        large=20 * MIB,
        gc=0.0,
        divisions=(0,) * 16,
        expandable=False,
        device=24 << 30,
        best=False,
    ):
        self.lib, self.events = lib, []
        conf = Config()
        assert lib.koila_cache_config_init(C.byref(conf), b"2.13") == 0
        assert conf.struct_size == C.sizeof(Config), (
            "the ctypes mirror of koila_cache_config is out of date"
        )
        conf.total_bytes, conf.cap_bytes, conf.device_bytes, conf.gc_threshold = (
            total,
            cap,
            device,
            gc,
        )
        conf.max_split_bytes = (1 << 64) - 1 if max_split == INF else max_split
        conf.large_segment_bytes, conf.max_non_split_rounding_bytes = (
            large,
            large if rounding is None else rounding,
        )
        conf.divisions[:] = divisions
        conf.expandable, conf.completion = expandable, best
        self.c = C.c_void_p()
        assert lib.koila_cache_new(C.byref(conf), None, C.byref(self.c), None) == 0
        self.fn = EVENT_FN(lambda _, e: self.events.append((e[0].kind, e[0].addr, e[0].size)))
        lib.koila_cache_observe(self.c, self.fn, None)

    def malloc(self, n, stream):
        addr = C.c_uint64()
        return (
            addr.value
            if self.lib.koila_cache_malloc(self.c, n, stream, Pool(), C.byref(addr)) == 0
            else None
        )

    def record_stream(self, addr, stream):
        assert self.lib.koila_cache_record_stream(self.c, addr, stream) == 0

    def release(self, addr):
        assert self.lib.koila_cache_release(self.c, addr) == 0

    def sync(self):
        self.lib.koila_cache_sync(self.c)

    def empty(self):
        self.lib.koila_cache_empty(self.c)

    def numbers(self):
        s = Stat()
        self.lib.koila_cache_stats(self.c, C.byref(s))
        return (
            s.num_alloc_retries,
            s.num_ooms,
            s.of[6][0].current,
            s.of[6][0].peak,
            s.of[1][0].current,
            s.of[1][0].peak,
            s.of[3][0].current,
            s.of[3][0].peak,
            s.of[8][0].current,
            s.of[8][0].peak,
        )

    def close(self):
        self.lib.koila_cache_free(self.c)


def load(path):
    lib = C.CDLL(path)
    u64, ptr = C.c_uint64, C.c_void_p
    lib.koila_cache_malloc.argtypes = [ptr, u64, u64, Pool, C.POINTER(u64)]
    lib.koila_cache_release.argtypes = [ptr, u64]
    lib.koila_cache_record_stream.argtypes = [ptr, u64, u64]
    lib.koila_cache_observe.argtypes = [ptr, EVENT_FN, ptr]
    for name in ("free", "sync", "empty"):
        getattr(lib, "koila_cache_" + name).argtypes = [ptr]
    lib.koila_cache_stats.argtypes = [ptr, C.POINTER(Stat)]
    return lib


M4 = (4,) * 16
CONFIGS = {
    "default": {},
    "total 300M": {"total": 300 * MIB},
    "total 100M": {"total": 100 * MIB},
    "total 300M, max_split 32M": {"total": 300 * MIB, "max_split": 32 * MIB},
    "max_split 40M, rounding 24M": {
        "max_split": 40 * MIB,
        "rounding": 24 * MIB,
        "total": 400 * MIB,
    },
    "divisions 4": {"divisions": M4, "total": 600 * MIB},
    "expandable": {"expandable": True},
    "expandable, total 300M": {"expandable": True, "total": 300 * MIB},
    "cap 300M, gc 0.5": {"cap": 300 * MIB, "gc": 0.5},
    "cap 200M, gc 0.8, total 300M, max_split 40M": {
        "cap": 200 * MIB,
        "gc": 0.8,
        "total": 300 * MIB,
        "max_split": 40 * MIB,
    },
    "expandable, cap 200M": {"expandable": True, "cap": 200 * MIB},
    "total 160M, max_split 32M": {"total": 160 * MIB, "max_split": 32 * MIB},
    "large segment 64M": {"large": 64 * MIB, "total": 1000 * MIB},
    "best, total 200M": {"best": True, "total": 200 * MIB},
}

EDGES = [
    1,
    511,
    512,
    513,
    MIB - 512,
    MIB,
    MIB + 1,
    2 * MIB,
    9 * MIB,
    10 * MIB - 512,
    10 * MIB,
    10 * MIB + 1,
    19 * MIB,
    20 * MIB - 512,
    20 * MIB,
    20 * MIB + 512,
    12 * MIB,
    32 * MIB,
    32 * MIB - 512,
    40 * MIB,
    40 * MIB + 1,
    44 * MIB,
    44 * MIB + 1,
    64 * MIB,
    60 * MIB,
    16 * MIB,
    52 * MIB,
    80 * MIB,
    24 * MIB,
    30 * MIB,
]


def history(rng, n_ops):
    """A program: malloc sizes on boundaries half the time; releases, streams, syncs."""
    ops, n_live = [], 0
    edges = (
        rng.sample(EDGES, 6)
        if rng.random() < 0.7
        else [x * MIB for x in rng.sample([20, 32, 40, 64, 80, 100], 4)]
    )
    grow, pure = rng.choice([45, 52, 60]), rng.choice([0.6, 0.95])
    for _ in range(n_ops):
        u = rng.random() * 100
        if u < grow or not n_live:
            k = rng.random()
            n = (
                rng.choice(edges)
                if k < pure
                else rng.randint(1, 4096)
                if rng.random() < 0.3
                else rng.randint(1, 2 * MIB)
                if rng.random() < 0.3
                else rng.randint(MIB, 80 * MIB)
            )
            ops.append(("malloc", n, 7 if rng.random() < 0.15 else 0))
            n_live += 1
        elif u < 96:
            ops.append(("release", rng.random(), rng.random() < 0.12))
            n_live -= 1
        else:
            ops.append(("sync",) if u < 98.5 else ("empty",))
    return ops


def three_then(n):
    """Three free blocks of 40 MiB, then one request: what random histories meet too rarely."""
    return [("malloc", 40 * MIB, 0)] * 3 + [("release", 0.0, False)] * 3 + [("malloc", n * MIB, 0)]


VECTORS = [
    ("total 160M, max_split 32M", three_then(80)),
    ("total 160M, max_split 32M", three_then(100)),
]


def play(ops, cache):
    live = []
    for op in ops:
        if op[0] == "malloc":
            addr = cache.malloc(op[1], op[2])
            if addr is not None:
                live.append(addr)
        elif op[0] == "release" and live:
            i = int(op[1] * len(live))
            addr = live[i]
            live[i] = live[-1]
            live.pop()
            if op[2]:
                cache.record_stream(addr, 9)
            cache.release(addr)
        elif op[0] == "sync":
            cache.sync()
        elif op[0] == "empty":
            cache.empty()
    for addr in live:
        cache.release(addr)
    cache.sync()
    cache.empty()


def differs(lib, conf, ops, fault=None):
    slow, fast = Cache(**conf, fault=fault), Native(lib, **conf)
    try:
        play(ops, slow)
    except (ValueError, KeyError, IndexError, AssertionError):
        if fault is None:
            raise
        fast.close()
        return "the faulty model broke down"
    try:
        play(ops, fast)
    except AssertionError:
        return "the native cache refused a call"
    p = slow.peak
    numbers = (
        slow.retries,
        slow.ooms,
        slow.reserved,
        p["reserved"],
        slow.allocated,
        p["allocated"],
        slow.active,
        p["active"],
        slow.split_bytes(),
        p["split"],
    )
    got = fast.numbers()
    fast.close()
    for i, (a, b) in enumerate(zip(slow.events, fast.events)):
        if a != b:
            return f"event {i}: model {a}, native {b}"
    if len(slow.events) != len(fast.events):
        return f"{len(slow.events)} events, native {len(fast.events)}"
    if numbers[:8] != got[:8]:
        return f"statistics: model {numbers}, native {got}"
    if slow.reserved or got[2]:
        return "memory left after empty_cache"
    return None


def run(lib, n_histories, n_ops=60, seed=1):
    for name, ops in VECTORS:
        assert differs(lib, CONFIGS[name], ops) is None, name
    for name, conf in CONFIGS.items():
        rng = random.Random(f"{seed} {name}")
        for i in range(n_histories):
            ops = history(rng, rng.randint(5, n_ops))
            what = differs(lib, conf, ops)
            assert what is None, f"{name}, history {i}: {what}"


def find_faults(lib, limit=3000, seed=2):
    """Each fault must be seen by some history of some configuration; returns how many histories it
    took."""
    took = {}
    for fault in FAULTS:
        rng = random.Random(f"{seed} {fault}")
        for i in range(limit):
            name, ops = (
                VECTORS[i] if i < len(VECTORS) else (rng.choice(list(CONFIGS)), history(rng, 60))
            )
            if differs(lib, CONFIGS[name], ops, fault):
                took[fault] = i + 1
                break
        else:
            raise AssertionError(f"nobody saw the planted fault {fault}: {FAULTS[fault]}")
    return took


def test_model_and_native_agree():
    import pytest

    if "KOILA_LIB" not in os.environ:
        pytest.skip("KOILA_LIB does not name libkoila.so")
    run(load(os.environ["KOILA_LIB"]), 30)


def test_planted_faults_are_seen():
    import pytest

    if "KOILA_LIB" not in os.environ:
        pytest.skip("KOILA_LIB does not name libkoila.so")
    find_faults(load(os.environ["KOILA_LIB"]))


if __name__ == "__main__":
    lib, n = load(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100
    t = time.time()
    took = find_faults(lib)
    print("planted faults, histories until seen:", ", ".join(f"{k} {v}" for k, v in took.items()))
    run(lib, n)
    print(f"{len(CONFIGS)} configurations x {n} histories agree, {time.time() - t:.0f} s")
    print(f"{len(CONFIGS) + len(FAULTS)} passed, 0 failed")
