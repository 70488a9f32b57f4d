"""Killed or alive: training steps in a container that kills at a limit on resident memory.

    python bench/bench_resident.py [--model gpt2] [--share 0.5] [--steps 4] [--watched] [--budget]

For each model: the peak of plain PyTorch's resident memory without a limit; then at each share of
that peak micro-batching by hand (in several sizes: alive if one is), and koila, which is told
nothing but what the container tells. Each in a process of its own, in a control group of its own
below that of this process, whose limit the kernel enforces. What lives by hand is not tried again
at a larger limit. That needs the right
to make one (version 1, or a delegated version 2). Without it, or with --watched: a program looks at
the process's resident memory a thousand times a second and kills it, and koila reads the limit from
files like those of a control group.

--budget: koila is told by koila.budget(limit, resident=True) instead.

"alive" is with the time of a step after the first; "told" is an exception, before the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

MIB = 1 << 20
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# rows by hand: the first that lives is the answer
BY_HAND = {"mlp": (2048, 256), "conv": (4, 1), "gpt2": (2, 1), "lstm": (16, 4)}
TOLD = 3  # exit status


# ---- the container


@dataclasses.dataclass
class Outcome:
    """`what`: alive, killed, told, or failed; `peak`: resident bytes, where the process told."""

    what: str
    text: str
    peak: int = 0
    seconds: float = 0.0


def own_group() -> tuple[pathlib.Path, int] | None:
    """The folder of this process's memory control group, and the version."""
    groups = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        where, kind, options = left.split()[3:5], right.split()[0], right.split()[2].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options):
            for group in groups:
                number, names, path = group.split(":", 2)
                if (number == "0") if kind == "cgroup2" else "memory" in names.split(","):
                    below = path.removeprefix(where[0]) if where[0] != "/" else path
                    folder = pathlib.Path(where[1] + below)
                    if kind == "cgroup" or (folder / "memory.current").exists():
                        return folder, 2 if kind == "cgroup2" else 1
    return None


@contextlib.contextmanager
def group(limit: int | None) -> Iterator[pathlib.Path]:
    """A control group below ours, with this limit. OSError: not allowed here."""
    ours = own_group()
    if ours is None:
        raise OSError("no control group of memory")
    folder = ours[0] / f"koila-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        if limit is not None:
            name = "memory.max" if ours[1] == 2 else "memory.limit_in_bytes"
            (folder / name).write_text(str(limit))
            with contextlib.suppress(OSError):  # no swapping instead of dying
                (folder / "memory.swap.max").write_text("0")
        yield folder
    finally:
        for _ in range(100):  # the kernel lets go of the dead a little later
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def groups_are_allowed() -> bool:
    try:
        with group(1 << 30):
            return True
    except OSError:
        return False


def outcome_of(process: subprocess.Popen[str]) -> Outcome:
    text = process.communicate()[0]
    if process.returncode == 0:
        peak = int(re.findall(r"^peak (\d+)", text, re.M)[-1])
        seconds = float(re.findall(r"^seconds ([\d.]+)", text, re.M)[-1])
        return Outcome("alive", text, peak, seconds)
    what = {-signal.SIGKILL: "killed", 128 + signal.SIGKILL: "killed", TOLD: "told"}
    return Outcome(what.get(process.returncode, "failed"), text)


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def in_group(command: list[str], limit: int | None) -> Outcome:
    with group(limit) as folder:
        join = f'echo $$ > "{folder}/cgroup.procs" && exec "$@"'
        return outcome_of(start(["/bin/sh", "-c", join, "sh", *command]))


def resident(pid: int) -> int:
    """Bytes that a control group counts: all but mapped files."""
    with open(f"/proc/{pid}/statm") as f:
        _, all_of_it, files = f.read().split()[:3]
    return (int(all_of_it) - int(files)) * os.sysconf("SC_PAGESIZE")


def watched(command: list[str], limit: int | None) -> Outcome:
    """What a control group would do, done by this process."""
    if limit is None:
        return outcome_of(start(command))
    with tempfile.TemporaryDirectory() as root:
        (pathlib.Path(root) / "proc/self").mkdir(parents=True)
        (pathlib.Path(root) / "proc/self/cgroup").write_text("0::/\n")
        mount = "31 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
        (pathlib.Path(root) / "proc/self/mountinfo").write_text(mount)
        folder = pathlib.Path(root) / "sys/fs/cgroup"
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        usage = folder / "memory.current"
        usage.write_text("0\n")
        process = start([*command, "--limits-from", root])

        def watch() -> None:
            told = 0
            with contextlib.suppress(OSError), usage.open("r+") as f:
                while process.poll() is None:
                    now = resident(process.pid)
                    if now > limit:
                        process.kill()
                    if abs(now - told) > MIB // 4:
                        told = now
                        os.pwrite(f.fileno(), f"{now:<20}\n".encode(), 0)
                    time.sleep(0.001)

        thread = threading.Thread(target=watch)
        thread.start()
        found = outcome_of(process)
        thread.join()
        return found


# ---- what runs in it


def made(name: str) -> tuple:
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    if name in ("mlp", "small mlp"):
        width, rows, depth = (256, 65536, 16) if name == "mlp" else (128, 65536, 8)
        layers = [f for _ in range(depth) for f in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        batch = torch.randn(rows, width), torch.randint(0, 10, (rows,))
        return model, batch, lambda m, x, y: F.cross_entropy(m(x), y)
    if name == "conv":

        def block(n: int, width: int) -> list[nn.Module]:
            return [nn.Conv2d(n, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]

        ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
        pieces = [*block(3, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 64)]
        batch = torch.randn(256, 3, 64, 64), torch.randint(0, 10, (256,))
        return nn.Sequential(*pieces, *ends), batch, lambda m, x, y: F.cross_entropy(m(x), y)
    if name == "gpt2":
        from small_gpt2 import small_gpt2

        model = small_gpt2(n_layer=6, n_head=8, n_embd=256, vocab_size=4096, n_positions=128)
        ids = torch.randint(0, 4096, (48, 128))

        def next_token(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m(x).logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())

        return model, (ids, ids.clone()), next_token

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(128, 192, 2, batch_first=True)
            self.head = nn.Linear(192, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    batch = torch.randn(640, 96, 128), torch.randint(0, 10, (640, 96))
    return Tagger(), batch, lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten())


def step_of(way: str, model, batch, loss_of, budget: int | None) -> Callable[[], float]:
    """One forward and backward, which returns the loss."""
    if way == "plain":

        def step() -> float:
            loss = loss_of(model, *batch)
            loss.backward()
            return loss.item()
    elif way == "koila":
        import koila

        if budget:
            koila.set_budget(budget, resident=True)

        def step() -> float:
            loss = loss_of(model, *koila.lazy(*batch, batch=0))
            loss.backward()
            return loss.item()
    else:
        rows, n = int(way), len(batch[0])

        def step() -> float:
            total = 0.0
            for piece in zip(*(x.split(rows) for x in batch), strict=True):
                loss = loss_of(model, *piece) * (len(piece[0]) / n)
                loss.backward()
                total += loss.item()
            return total

    return step


def status() -> dict[str, int]:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return {k: int(v.split()[0]) * 1024 for k, v in (x.split(":") for x in lines) if "kB" in v}


def child(args: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    model, batch, loss_of = made(args.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if args.way == "koila" and args.limits_from and not args.limit:
        from koila import _core

        _core.limits_from(args.limits_from)
    try:
        step, seconds = step_of(args.way, model, batch, loss_of, args.limit), []
        for _ in range(args.steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = step()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            told = ""
            if args.way == "koila":
                import koila
                from koila import _core

                plan = koila.last_plan()
                told = f"{plan.n_micro_batches} slices, {plan.retries} retries, {_core.resident()}"
            now = status()
            print(
                f"loss {loss:.6f} {seconds[-1]:.2f}s {now['VmHWM'] // MIB} MiB {told}", flush=True
            )
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
        if "memory" in str(error):
            return TOLD
        raise
    now = status()
    print(f"seconds {min(seconds[1:] or seconds):.3f}")
    print(f"peak {now['VmHWM'] - now['RssFile']}")
    return 0


def run(
    model: str, way: str, limit: int | None, steps: int, *, watch: bool, budget: bool = False
) -> Outcome:
    """One process. budget: koila is told the limit by a budget, not by the container."""
    command = [sys.executable, __file__, "--child", "--model", model, "--way", way]
    command += ["--steps", str(steps)]
    if budget and limit and way == "koila":
        command += ["--limit", str(limit)]
    return (watched if watch else in_group)(command, limit)


def best_by_hand(model: str, limit: int, steps: int, *, watch: bool) -> Outcome:
    for rows in BY_HAND[model]:
        found = run(model, str(rows), limit, steps, watch=watch)
        if found.what == "alive":
            break
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--share", type=float)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--watched", action="store_true")
    parser.add_argument("--budget", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    for hidden in ("--way", "--limits-from"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    watch = args.watched or not groups_are_allowed()
    print("killed by", "a program that watches" if watch else "the kernel, in a control group")
    print("| model | plain's peak | limit | by hand | koila |\n|---|---|---|---|---|")
    for model in [args.model] if args.model else BY_HAND:
        peak = run(model, "plain", None, 2, watch=watch).peak
        by_hand = Outcome("not tried", "")
        for share in [args.share] if args.share else SHARES:
            limit = int(share * peak)
            if by_hand.what != "alive":
                by_hand = best_by_hand(model, limit, 2, watch=watch)
            found = run(model, "koila", limit, args.steps, watch=watch, budget=args.budget)
            cells = [
                f"{f.what} {f.seconds:.1f} s" if f.seconds else f.what for f in (by_hand, found)
            ]
            cells[:0] = [model, f"{peak / MIB:.0f} MiB", f"{share} = {limit / MIB:.0f} MiB"]
            print(f"| {' | '.join(cells)} |", flush=True)
            if args.verbose:
                print(found.text, file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
