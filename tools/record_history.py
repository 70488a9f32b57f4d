"""Record histories of PyTorch's CUDA allocator, and check the model against each. Needs a GPU, or
the simulated one (tests/fakecuda); FAKECUDA_NUMBERS=0 is enough there.

    python tools/record_history.py OUT [--only NAME,NAME] [--jobs 6] [--seconds 240]
    python tools/record_history.py OUT --check     the check alone, of recordings made elsewhere
    ... --koila build/koila     the command that checks: else the one beside this Python, in this
                                tree's build folder, or on PATH

Every case runs in a process of its own (a fork of this one, which imports torch and never touches
the device), with the history on before anything is allocated. It writes
OUT/NAME.pickle (torch.cuda.memory._dump_snapshot) and OUT/NAME.json (torch.cuda.memory_stats() at
the end, versions, settings). `koila simulate` checks each recording in three ways:

- the replay is exact;
- the statistics of the replay equal torch's, key by key;
- for programs that only allocate and free, the requests alone give the same statistics. The model
  itself then decides when memory runs out, when to collect and which segments to give back.

The result is a table, printed and written to OUT/table.md.

Programs: `random` is a stream of sizes, frees, record_stream, synchronize and empty_cache drawn by
splitmix64; `pure` only allocates and frees; the others are training steps, CUDA graphs, memory
pools, and what their names say."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda"
MIB = 1 << 20
OutOfMemory = torch.OutOfMemoryError


# ---- programs


def splitmix64(state: int) -> Iterator[int]:
    mask = (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def take(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device=DEVICE)


def size_of(k: int, x: int) -> int:
    return (
        1 + x % 4096
        if k < 3
        else 1 + x % 2097152
        if k < 5
        else 1048576 + x % 11534336
        if k < 8
        else 10485760 + x % 83886080
    )


def pure(n: int, start: int) -> None:
    """Allocates and frees on one stream, nothing else: its requests are the whole story."""
    draw, live = splitmix64(start), []
    for _ in range(n):
        u = next(draw)
        if u % 100 < 54 or not live:
            w, x = next(draw), next(draw)
            with contextlib.suppress(OutOfMemory):
                live.append(take(size_of(w % 10, x)))
        else:
            i = next(draw) % len(live)
            live[i] = live[-1]
            live.pop()


def random(n: int, start: int, empties: bool = True) -> None:
    """The long sequences of the model's own tests, with real streams; half of what a stream uses is
    still in use when it is freed."""
    draw, live = splitmix64(start), []
    side, user = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(n):
        u = next(draw)
        if u % 100 < 52 or not live:
            w, x = next(draw), next(draw)
            with (
                contextlib.suppress(OutOfMemory),
                torch.cuda.stream(side) if (w >> 32) % 4 == 3 else contextlib.nullcontext(),
            ):
                live.append(take(size_of(w % 10, x)))
        elif u % 100 < 95:
            i = next(draw) % len(live)
            t, live[i] = live[i], live[-1]
            live.pop()
            if (u >> 32) % 8 == 0:
                if (u >> 36) % 2:
                    with torch.cuda.stream(user):
                        torch.cuda._sleep(1_000_000)
                t.record_stream(user)
            del t
        elif u % 100 < 98 or not empties:
            torch.cuda.synchronize()
        else:
            torch.cuda.empty_cache()


def train(
    model: nn.Module,
    make: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    half: bool = False,
    steps: int = 3,
    between: Callable[[int], None] = lambda _: None,
    **how: Any,
) -> None:
    model = model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
    for i in range(steps):
        x, y = make()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        between(i)
    torch.cuda.synchronize()


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
    )


def rows(n: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 512, device=DEVICE), torch.zeros(n, dtype=torch.long, device=DEVICE)


def resnet(**how: Any) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    import zoo

    train(
        zoo.ResNet(width=32, classes=100),
        lambda: (
            torch.randn(32, 3, 64, 64, device=DEVICE),
            torch.zeros(32, dtype=torch.long, device=DEVICE),
        ),
        **how,
    )


class Decoder(nn.Module):
    """Shaped like a small GPT-2: learned positions, causal layers, a head over the vocabulary."""

    def __init__(
        self, width: int = 256, layers: int = 4, vocabulary: int = 5000, length: int = 256
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers, self.norm, self.head = (
            nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).layers,
            nn.LayerNorm(width),
            nn.Linear(width, vocabulary, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=h.dtype
        )
        for layer in self.layers:
            h = layer(h, mask, is_causal=True)
        return self.head(self.norm(h))


def decoder(**how: Any) -> None:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(8, 256, dtype=torch.long, device=DEVICE)
        return x, x

    train(Decoder(), make, **how)


def graphs(expire: bool) -> None:
    """A training step captured and replayed, and a second graph in the first one's pool; then
    perhaps both are dropped and the cache emptied."""
    model = perceptron().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    x, y = rows()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        step()
    with torch.cuda.graph(second, pool=first.pool()), torch.no_grad():
        out = model(x)
    between = take(30 * MIB)
    for _ in range(3):
        first.replay()
        second.replay()
    torch.cuda.synchronize()
    del between, out
    if expire:
        optimizer.zero_grad(set_to_none=True)
        first.reset()
        second.reset()
        del first, second
        torch.cuda.empty_cache()
        keep = [take(n * MIB) for n in (1, 3, 12, 25)]
        del keep


def pools(
    kinds: tuple[dict[str, bool], ...] = ({}, {}), capped: bool = False, expire: bool = True
) -> None:
    """Requests routed by turns to memory pools and past them."""
    draw = splitmix64(5)
    made = [torch.cuda.MemPool(**k) for k in kinds]
    live: list[torch.Tensor] = []
    for i in range(400):
        u, w, x = next(draw), next(draw), next(draw)
        if u % 100 < 55 or not live:
            n = size_of(w % 10, x)
            with contextlib.suppress(OutOfMemory):
                which = (u >> 32) % (len(made) + 1)
                if which < len(made):
                    with torch.cuda.use_mem_pool(made[which]):
                        live.append(take(n))
                else:
                    live.append(take(n))
        else:
            live.pop(w % len(live))
        if i == 250 and not capped:
            torch.cuda.empty_cache()
    if capped:  # what lies free in a pool made for it is lent to those who find nothing else
        del live[::2]
        with contextlib.suppress(OutOfMemory):
            for _ in range(60):
                live.append(take(7 * MIB))
    if expire:
        live.clear()
        made.clear()
        torch.cuda.empty_cache()


def out_of_memory() -> None:
    """Asks in the middle for more than the card has, which is caught; and for more than there are
    numbers."""
    model = perceptron().to(DEVICE)
    pure(150, 8)
    for n in (200 << 30, 1 << 61):
        with contextlib.suppress(OutOfMemory, RuntimeError):
            take(n)
        train(model, rows, steps=1)
    pure(150, 9)


def two_streams() -> None:
    """A step whose batch was copied in on another stream, a step ahead, and handed over by
    record_stream."""
    model, side = perceptron().to(DEVICE), torch.cuda.Stream()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        with torch.cuda.stream(side):
            x, y = (
                t.pin_memory().to(DEVICE, non_blocking=True)
                for t in (torch.randn(2048, 512), torch.zeros(2048, dtype=torch.long))
            )
        torch.cuda.current_stream().wait_stream(side)
        for t in (x, y):
            t.record_stream(torch.cuda.current_stream())
        F.cross_entropy(model(x), y).backward()
        del x, y, t
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


def switched() -> None:
    """Expandable segments are turned on and off in the middle."""
    for i, on in enumerate((False, True, False, True)):
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{on}")
        pure(120, 20 + i)


def capped_in_the_middle() -> None:
    pure(300, 30)
    torch.cuda.set_per_process_memory_fraction(
        torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    )
    pure(300, 31)


# ---- cases


class Case(NamedTuple):
    run: Callable[[], None]
    conf: str = ""
    cap: int = 0  # MiB
    frames: bool = False
    before: Callable[[], None] | None = None  # runs before the history is on
    max_entries: int = sys.maxsize
    only_requests: bool = False  # the program's requests decide everything


def settings() -> dict[str, tuple[str, int]]:
    return {
        "default": ("", 0),
        "cap": ("", 600),
        "cap-6000": ("", 6000),
        "split32-cap": ("max_split_size_mb:32", 600),
        "split32": ("max_split_size_mb:32", 0),
        "divisions4": ("roundup_power2_divisions:4", 0),
        "expandable": ("expandable_segments:True", 0),
        "expandable-cap": ("expandable_segments:True", 600),
        "gc50-cap": ("garbage_collection_threshold:0.5", 600),
        "gc80-split40-cap": ("garbage_collection_threshold:0.8,max_split_size_mb:40", 500),
        "segment64": ("large_segment_size_mb:64", 0),
        "segment12-cap": ("large_segment_size_mb:12", 600),
        "rounding40-split32-cap": ("max_split_size_mb:32,max_non_split_rounding_mb:40", 600),
    }


def cases() -> dict[str, Case]:
    out: dict[str, Case] = {}
    for i, (name, (conf, cap)) in enumerate(settings().items()):
        n, m = (6000, 2500) if cap > 1000 else (3000, 700)
        out[f"random-{name}"] = Case(lambda n=n, i=i: random(n, i + 1), conf, cap)
        out[f"pure-{name}"] = Case(lambda n=n, i=i: pure(n, i + 1), conf, cap, only_requests=True)
        small = cap // 4 if 0 < cap <= 1000 else cap  # small ones run out too
        out[f"short-{name}"] = Case(lambda m=m, i=i: random(m, i + 101, cap == 0), conf, small)
    out |= {
        "mlp": Case(lambda: train(perceptron(), rows)),
        "mlp-frames": Case(lambda: train(perceptron(), rows, steps=2), frames=True),
        "mlp-empty-cache": Case(
            lambda: train(
                perceptron(),
                rows,
                steps=4,
                between=lambda i: torch.cuda.empty_cache() if i == 1 else None,
            )
        ),
        "resnet": Case(resnet),
        "resnet-expandable": Case(resnet, "expandable_segments:True"),
        "decoder": Case(decoder),
        "decoder-bf16-fused": Case(lambda: decoder(half=True, fused=True)),
        "decoder-bf16-expandable": Case(lambda: decoder(half=True), "expandable_segments:True"),
        "decoder-split32": Case(decoder, "max_split_size_mb:32"),
        "graphs-kept": Case(lambda: graphs(False)),
        "graphs-expired": Case(lambda: graphs(True)),
        "graphs-expandable": Case(lambda: graphs(True), "expandable_segments:True"),
        "pools": Case(pools),
        "pools-kept": Case(lambda: pools(expire=False)),
        "pools-expandable": Case(pools, "expandable_segments:True"),
        "pool-no-split": Case(lambda: pools(({"no_split": True},))),
        "pool-use-on-oom": Case(lambda: pools(({"use_on_oom": True},), capped=True), "", 500),
        "oom-caught": Case(out_of_memory),
        "oom-caught-expandable": Case(out_of_memory, "expandable_segments:True"),
        "two-streams": Case(two_streams),
        "switched": Case(switched),
        "capped-in-the-middle": Case(capped_in_the_middle),
        "window": Case(lambda: random(700, 41), before=lambda: pure(300, 40)),
        "ring": Case(lambda: pure(1500, 42), max_entries=1000),
    }
    return out


# ---- one recording, in a process of its own


def record(name: str, out: Path) -> dict[str, Any]:
    case = cases()[name]
    torch.backends.cuda.enable_cudnn_sdp(False)  # a simulated device has none
    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    fraction = (case.cap * MIB + 0.5) / total if case.cap else 0.0
    if case.before:
        case.before()
    torch.cuda.memory._record_memory_history(
        "all", context="all" if case.frames else None, stacks="python", max_entries=case.max_entries
    )
    if fraction:
        torch.cuda.set_per_process_memory_fraction(fraction)
    started = time.perf_counter()
    case.run()
    torch.cuda.synchronize()
    stats = dict(torch.cuda.memory_stats())
    torch.cuda.memory._dump_snapshot(str(out / f"{name}.pickle"))
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "card": torch.cuda.get_device_name(),
        "total_memory": total,
        "conf": case.conf,
        "fraction": fraction,
        "seconds": round(time.perf_counter() - started, 3),
        "stats": {k: v for k, v in stats.items() if isinstance(v, (int, float))},
    }


# ---- the checks


def koila_command(given: str | None) -> str:
    """The command of --koila, beside this Python, of this tree's build, or on PATH."""
    if given:
        return given
    places = [Path(sys.executable).parent / "koila", ROOT / "build" / "koila"]
    found = next((str(p) for p in places if p.exists()), None) or shutil.which("koila")
    if not found:
        sys.exit("no koila command: build it, put it on PATH, or name it with --koila")
    return found


def simulate(koila: str, file: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    r = subprocess.run(
        [koila, "simulate", str(file), "--json", *options], capture_output=True, text=True
    )
    try:
        return r.returncode, json.loads(r.stdout), r.stderr.strip()
    except ValueError:
        return r.returncode, {}, r.stderr.strip() or r.stdout[-200:]


def differences(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {k: (ours[k], theirs[k]) for k in ours if k in theirs and ours[k] != theirs[k]}


DECISIONS = (
    "retries",
    "retry_or_empty_cache",
    "empty_cache",
    "cap_set",
    "expandable_switched",
    "collected",
    "start_learned",
)


def requests_alone(
    koila: str, file: Path, conf: str, version: str, said: dict[str, Any]
) -> dict[str, tuple[int, int]] | str:
    """Statistics that differ when the recorded requests alone are run through the model, or what
    the command said where it could not run them."""
    if said["fraction"]:
        fraction = f"per_process_memory_fraction:{said['fraction']:.15f}"
        conf = ",".join(filter(None, [conf, fraction]))
    memory = f"{said['total_memory']}B"
    options = ["--conf", conf] if conf else []
    _, told, words = simulate(koila, file, "--torch", version, "--memory", memory, *options)
    return differences(told["what_if"]["stats"], said["stats"]) if told else words


def check(koila: str, name: str, out: Path) -> dict[str, Any]:
    """Recording `name` of folder `out`, replayed: the verdict, and what differs from torch."""
    case, file = cases()[name], out / f"{name}.pickle"
    said = json.loads((out / f"{name}.json").read_text())
    if "error" in said or not file.exists():
        reason = said.get("error", "no file").strip().splitlines() or ["?"]
        return {"verdict": f"not recorded: {reason[-1][:200]}"}
    version = ".".join(said["torch"].split(".")[:2])
    _, inferred, _ = simulate(koila, file, "--check")
    _, told, words = simulate(koila, file, "--check", "--torch", version)
    if not told:
        return {"verdict": f"refused: {words[:300]}", "bytes": file.stat().st_size}
    replay = told["replay"]
    row = {
        "bytes": file.stat().st_size,
        "events": told["events"],
        "verdict": replay["verdict"],
        "reason": replay["reason"],
        "at_event": replay.get("at_event"),
        "inferred": inferred.get("torch"),
        "inferred_verdict": inferred.get("replay", {}).get("verdict"),
        "unknown_keys": told["unknown_keys"],
        "skipped": told["skipped_events"],
        "decisions": {k: replay[k] for k in DECISIONS if replay[k]},
        "end_checked": replay["end_checked"],
        "words": words,
        "ooms": told["ooms"],
        "stats": {
            k: d
            for k, d in differences(told["stats"], said["stats"]).items()
            if k not in told["stats_uncertain"]
        },
        "not_in_torch": sorted(k for k in told["stats"] if k not in said["stats"]),
    }
    if case.only_requests:
        row["requests"] = requests_alone(koila, file, case.conf, version, said)
    return row


def describe(path: Path) -> dict[str, Any]:
    """What fields this torch writes: the reader's table of versions is held against it."""
    with path.open("rb") as f:
        s = pickle.load(f)
    entries = [e for trace in s["device_traces"] for e in trace]
    blocks = [b for g in s["segments"] for b in g["blocks"]]

    def keys(many: list[dict[str, Any]]) -> list[str]:
        return sorted({k for x in many for k in x})

    return {
        "top": sorted(s),
        "settings": {k: repr(v) for k, v in s.get("allocator_settings", {}).items()},
        "entry": keys(entries),
        "segment": keys(s["segments"]),
        "block": keys(blocks),
        "actions": sorted({e["action"] for e in entries}),
        "states": sorted({b["state"] for b in blocks}),
        "first": [repr(e)[:300] for e in entries[:2]],
        "last": repr(entries[-1:])[:300],
    }


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| recording | KB | events | ooms | replay | decisions | statistics | requests alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in found.items():
        word = r["verdict"] + (f": {r['reason']}" if r.get("reason") else "")
        if r.get("inferred_verdict", r["verdict"]) != r["verdict"]:
            word += f" (as inferred, {r['inferred']}: {r['inferred_verdict']})"

        def same(d: Any) -> str:
            if not isinstance(d, dict):
                return str(d or "")[:80]
            return (
                "same"
                if not d
                else f"{len(d)} differ: "
                + ", ".join(f"{k} {a} not {b}" for k, (a, b) in list(d.items())[:3])
            )

        decisions = ", ".join(f"{v} {k}" for k, v in r.get("decisions", {}).items())
        lines.append(
            f"| {name} | {r.get('bytes', 0) >> 10} | {r.get('events', '')} | {r.get('ooms', '')} "
            f"| {word} | {decisions} | {same(r.get('stats'))} | {same(r.get('requests'))} |"
        )
    return lines


SECONDS_A_CASE = 120


def record_in_a_child(name: str, out: Path) -> int:
    """Forks a process that records `name` and ends; returns its id. It leaves OUT/NAME.json, with
    an "error" where something went wrong."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    result = out / f"{name}.json"
    status = 1
    try:
        signal.alarm(SECONDS_A_CASE)  # its default action ends the process
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = cases()[name].conf
        said = record(name, out)
        result.write_text(json.dumps(said, indent=1))
        status = 0
    except BaseException:
        result.write_text(json.dumps({"error": traceback.format_exc()[-1500:]}))
    finally:
        os._exit(status)


def record_all(names: list[str], out: Path, jobs: int, seconds: float) -> None:
    """Records all cases, `jobs` at a time; none is started when `seconds` have passed."""
    importlib.import_module("torch._dynamo")  # optimizers import it: once, not once a case
    started = time.monotonic()
    running: dict[int, str] = {}

    def wait_for_one() -> None:
        child, status = os.wait()
        name = running.pop(child)
        if os.WIFSIGNALED(status):
            error = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
            (out / f"{name}.json").write_text(json.dumps({"error": error}))

    for name in names:
        if len(running) >= jobs:
            wait_for_one()
        if time.monotonic() - started >= seconds:
            error = f"not started within {seconds:.0f} s"
            (out / f"{name}.json").write_text(json.dumps({"error": error}))
            continue
        running[record_in_a_child(name, out)] = name
    while running:
        wait_for_one()


def check_all(koila: str, names: list[str], out: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        if (out / f"{name}.json").exists():
            try:
                found[name] = check(koila, name, out)
            except Exception as e:
                found[name] = {"verdict": f"check failed: {type(e).__name__}: {e}"}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="no recording is started after so many"
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--koila", help="the command that checks; else looked for")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = [n for n in args.only.split(",") if n] or list(cases())
    for unknown in set(names) - set(cases()):
        parser.error(f"no case {unknown}; there are {', '.join(cases())}")
    koila = koila_command(args.koila)
    started = time.monotonic()
    if not args.check:
        record_all(names, args.out, args.jobs, args.seconds)
    found = check_all(koila, names, args.out)
    lines = table(found)
    first = next(
        (args.out / f"{n}.pickle" for n in names if (args.out / f"{n}.pickle").exists()), None
    )
    with (args.out / "checks.json").open("w") as f:
        json.dump({"found": found, "fields": describe(first) if first else None}, f, indent=1)
    (args.out / "table.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if all(r["verdict"].startswith("exact") for r in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
