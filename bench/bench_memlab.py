"""The cost of koila.memlab as ratios to the same program without it, beside the installed peers.
All run interleaved in one process; results are minima, and percentiles for steps.

    python bench/bench_memlab.py [--rounds 7] [--only step,line,...]

The step is a training step of a tiny transformer on the CPU, one thread; single steps are timed, a
hundred in a turn (`--only alone`: without the peers). Peers: pytorch_memlab, line_profiler,
memory_profiler, memray, torch.profiler. Ratios can be compared; microseconds depend on the machine.
Nothing here asserts: CI checks instruction counts instead (instructions.py). `--only gpu`: a step
of GPT-2 small's size and the tiny one on a GPU, by the wall clock, with the step and every forward
profiled.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import platform
import sys
import tempfile
import time

import torch

from koila import memlab
from koila.memlab import LineProfiler, MemReporter

torch.set_num_threads(1)


def clock(f, n):
    """Seconds of processor time a call. On a shared machine it is close to the wall clock of an
    idle one."""
    t = time.process_time()
    for _ in range(n):
        f()
    return (time.process_time() - t) / n


def single(f, n):
    """Seconds of processor time of each of n calls."""
    seconds = []
    for _ in range(n):
        t = time.process_time()
        f()
        seconds.append(time.process_time() - t)
    return seconds


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0),
            2,
            enable_nested_tensor=False,
        )
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x):
        hidden = self.layers(x)
        pooled = hidden.mean(1)
        return self.head(pooled)


def make_step():
    torch.manual_seed(0)
    model = Tiny()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(8, 16, 64), torch.randint(0, 10, (8,))

    def step():
        opt.zero_grad()
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        loss.backward()
        opt.step()

    return step


def row(name, value, note=""):
    print(f"{name:<58s}{value:>14s}  {note}", flush=True)


def step_costs(rounds, alone=False):
    step, n = make_step(), 100
    idle_of = lambda: None  # noqa: E731

    @contextlib.contextmanager
    def ours(*functions):
        with LineProfiler(*functions):
            yield step

    @contextlib.contextmanager
    def nothing():
        memlab.stop()
        yield step

    arms = {
        "nothing": nothing,
        "koila.memlab, the model's forward profiled": lambda: ours(Tiny.forward),
        "koila.memlab, the step profiled": lambda: ours(step),
        "koila.memlab, enabled for a function that does not run": lambda: ours(idle_of),
    }
    peers = {}
    if importlib.util.find_spec("line_profiler"):
        import line_profiler

        @contextlib.contextmanager
        def other():
            p = line_profiler.LineProfiler()
            wrapped = p(step)
            yield wrapped

        peers["line_profiler"] = other
    if importlib.util.find_spec("memory_profiler"):
        import memory_profiler

        @contextlib.contextmanager
        def mp():
            yield memory_profiler.profile(step, stream=io.StringIO())

        peers["memory_profiler"] = mp
    if importlib.util.find_spec("memray"):
        import memray

        @contextlib.contextmanager
        def mr():
            with tempfile.TemporaryDirectory() as d, memray.Tracker(f"{d}/out.bin"):
                yield step

        peers["memray"] = mr
    if importlib.util.find_spec("pytorch_memlab"):
        with contextlib.suppress(Exception):
            from pytorch_memlab import LineProfiler as Old

            @contextlib.contextmanager
            def old():
                with Old(step):
                    yield step

            peers["pytorch_memlab"] = old

    @contextlib.contextmanager
    def tp():
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            yield step

    peers["torch.profiler, memory"] = tp
    arms |= {} if alone else peers
    clock(step, n)
    times = {name: [] for name in arms}
    names = list(arms)
    for _ in range(rounds):
        names.append(names.pop(0))  # nobody always comes after the same one
        for name in [name for name in names if times[name] is not None]:
            try:
                with arms[name]() as f:
                    f()
                    times[name] += single(f, n if "memory_profiler" not in name else 5)
            except Exception as error:
                times[name] = None
                row(name, "failed", f"{type(error).__name__}: {error}"[:60])
            memlab.stop()
    ordered = {name: sorted(t) for name, t in times.items() if t}
    at = lambda name, share: ordered[name][int(share * len(ordered[name]))]  # noqa: E731
    row(
        "step without a profiler",
        f"{at('nothing', 0.05) * 1e6:.0f} us",
        "5th percentile; ratios of these, of the 1st and the 25th",
    )
    for name in [name for name in ordered if name != "nothing"]:
        ratios = [at(name, share) / at("nothing", share) for share in (0.05, 0.01, 0.25)]
        row(
            f"  {name}",
            f"{ratios[0]:.3f}x",
            f"{ratios[1]:.3f}x {ratios[2]:.3f}x   "
            f"+{(at(name, 0.05) - at('nothing', 0.05)) * 1e6:.0f} us",
        )
    memlab.backend()


def line_costs(rounds):
    source = (
        "def loop(n):\n    i = 0\n    while i < n:\n        i += 1\n" + "    i = i\n" * {0}.pop()
    )
    for n_lines in (5, 5000):
        space = {}
        exec(compile(source + "    i = i\n" * (n_lines - 4), f"<{n_lines} lines>", "exec"), space)
        loop, n = space["loop"], 200_000
        p, plain, seen = LineProfiler(loop), [], []
        for _ in range(rounds):
            plain.append(clock(lambda: loop(n), 1))
            with p:
                seen.append(clock(lambda: loop(n), 1))
        row(
            f"one profiled line event, function of {n_lines} lines",
            f"{(min(seen) - min(plain)) / (2 * n) * 1e9:.1f} ns",
        )

    def callee():
        pass

    def calls(n):
        for _ in range(n):
            callee()

    plain, seen, p = [], [], LineProfiler(loop)
    for _ in range(rounds):
        plain.append(clock(lambda: calls(200_000), 1))
        with p:
            seen.append(clock(lambda: calls(200_000), 1))
    row(
        "one Python call, profiler enabled for something else",
        f"{(min(seen) - min(plain)) / 200_000 * 1e9:.1f} ns",
    )
    with p:
        loop(500_000)
    row(
        "display after 1e6 line events",
        f"{min(clock(lambda: str(p.display()), 1) for _ in range(5)) * 1e3:.2f} ms",
        "5000 lines",
    )


def hook_costs(rounds):
    import koila._core as core

    make = lambda: torch.empty(16)  # noqa: E731
    on, off, live = [], [], []
    for _ in range(rounds):
        memlab.start()
        on.append(clock(make, 50_000))
        core.memlab_stop()
        off.append(clock(make, 50_000))
        memlab.start()
    row("torch.empty(16), count off", f"{min(off) * 1e9:.0f} ns")
    row(
        "torch.empty(16), count on",
        f"{min(on) * 1e9:.0f} ns",
        f"+{(min(on) - min(off)) * 1e9:.0f} ns an allocate-and-free pair",
    )
    live = [torch.empty(16) for _ in range(100_000)]
    row("  with 100 000 live blocks", f"{min(clock(make, 50_000) for _ in range(3)) * 1e9:.0f} ns")
    del live


def report_costs(rounds):
    live = [torch.empty(4) for _ in range(100_000)]
    r, rows, all_ = MemReporter(), [], []
    for _ in range(rounds):
        gc.collect()
        t = time.process_time()
        r.collect_tensor()
        rows.append(time.process_time() - t)
        r.get_stats()
        r.text()
        all_.append(time.process_time() - t)
    row("report of 100 000 tensors: rows", f"{min(rows):.3f} s")
    row("report of 100 000 tensors: as text", f"{min(all_):.3f} s")
    del live
    x = torch.ones(2, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y.exp()
    names = r._names
    with_graph = min(clock(names.collect, 1) for _ in range(rounds))
    del y
    without = min(clock(names.collect, 1) for _ in range(rounds))
    row(
        "saved-tensor walk",
        f"{(with_graph - without) / 20_000 * 1e6:.2f} us",
        "a node, with its row: each saved a tensor of its own",
    )
    import koila._core as core

    heap = [[i] for i in range(2_000_000)]
    t = min(clock(lambda: core.find_tensors(torch), 1) for _ in range(3))
    row("scan of a heap with 2 M more objects for tensors", f"{t * 1e3:.0f} ms")
    row(
        "  gc.get_objects() alone",
        f"{min(clock(gc.get_objects, 1) for _ in range(3)) * 1e3:.0f} ms",
    )
    del heap


class Gpt(torch.nn.Module):
    """GPT-2's shape: small is width 768, 12 heads, 12 layers, 50257 words."""

    def __init__(self, width, heads, layers, words, context):
        super().__init__()
        self.words, self.places = (
            torch.nn.Embedding(words, width),
            torch.nn.Embedding(context, width),
        )
        block = dict(
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, heads, **block) for _ in range(layers)
        )
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        n = ids.shape[1]
        hidden = self.words(ids) + self.places.weight[:n]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(n, device=ids.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def gpu_costs(rounds):
    if not torch.cuda.is_available():
        return row("a step on a GPU", "no GPU")

    def wall(f, n):
        torch.cuda.synchronize()
        t = time.perf_counter()
        for _ in range(n):
            f()
        torch.cuda.synchronize()
        return (time.perf_counter() - t) / n

    @contextlib.contextmanager
    def history():
        torch.cuda.memory._record_memory_history()
        try:
            yield
        finally:
            torch.cuda.memory._record_memory_history(None)

    def profiler():
        from torch.profiler import ProfilerActivity, profile

        return profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True
        )

    for title, sizes, batch, n in (
        ("GPT-2 small", (768, 12, 12, 50257, 512), 8, 5),
        ("tiny", (64, 4, 2, 100, 16), 8, 50),
    ):
        torch.manual_seed(0)
        model = Gpt(*sizes).cuda()
        ids = torch.randint(0, sizes[3], (batch, sizes[4] + 1), device="cuda")
        opt = torch.optim.AdamW(model.parameters(), fused=True)

        def step(model=model, ids=ids, opt=opt):
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(ids[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            opt.step()

        every = (step, *model.modules())
        arms = {
            "koila.memlab, the step and every forward": lambda every=every: LineProfiler(*every),
            '  the same, stats="hook"': lambda every=every: LineProfiler(*every, stats="hook"),
            "koila.memlab, the step": lambda step=step: LineProfiler(step),
            "torch.cuda.memory._record_memory_history": history,
            "torch.profiler, memory": profiler,
        }
        if importlib.util.find_spec("pytorch_memlab"):
            with contextlib.suppress(Exception):
                from pytorch_memlab import LineProfiler as Old

                arms["pytorch_memlab, the step and every forward"] = (
                    lambda Old=Old, model=model, step=step: Old(
                        step, *{type(m).forward for m in model.modules()}
                    )
                )
        wall(step, n)
        base, best = {k: [] for k in arms}, {k: [] for k in arms}
        for _ in range(rounds):
            for name, arm in list(arms.items()):
                memlab.stop()
                base[name].append(wall(step, n))
                try:
                    with arm():
                        step()  # what the first step costs once is not a step's cost
                        best[name].append(wall(step, n if "pytorch_memlab" not in name else 2))
                except Exception as error:
                    row(name, "failed", f"{type(error).__name__}: {error}"[:90])
                    best[name] = None
                    del arms[name]
        row(
            f"{title} on {torch.cuda.get_device_name()}",
            f"{min(map(min, base.values())) * 1e3:.3f} ms",
            "a step without a profiler",
        )
        for name, times in best.items():
            if times:
                row(
                    f"  {name}",
                    f"{min(times) / min(base[name]):.4f}x",
                    f"+{(min(times) - min(base[name])) * 1e6:.0f} us",
                )
        del model, opt, step, every, arms
        gc.collect()
        torch.cuda.empty_cache()
    memlab.backend()


def import_cost(rounds):
    import subprocess

    code = (
        "import sys, time, torch, inspect; t = time.perf_counter(); import koila.memlab as m; "
        "[getattr(m, n) for n in m.__all__]; print(time.perf_counter() - t)"
    )
    t = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(3)
    )
    row("import of everything, beyond torch", f"{t * 1e3:.1f} ms")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="step,line,hook,report,import")
    args = parser.parse_args()
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, "
        f"lines by {memlab_way()}"
    )
    for name, f in dict(
        step=step_costs,
        alone=lambda rounds: step_costs(rounds, alone=True),
        line=line_costs,
        hook=hook_costs,
        report=report_costs,
        gpu=gpu_costs,
    ).items():
        if name in args.only.split(","):
            f(args.rounds)
    if "import" in args.only:
        import_cost(args.rounds)


def memlab_way():
    import koila._core as core

    return core.lines_way()


if __name__ == "__main__":
    main()
