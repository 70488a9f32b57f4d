"""Runs on every CPython that koila supports, without torch: allocator events are made by hand, the
expected table is written by hand below.
Usage: python lines_oracle.py [all-taken]   (koila importable). Prints "1 passed, 0 failed".
all-taken: on 3.12 and later, with no tool id of sys.monitoring left, and with somebody else's
tracer installed."""

import sys
import types
from importlib.util import find_spec

TAKEN = "all-taken" in sys.argv and sys.version_info >= (3, 12)
if TAKEN:
    for tool in (2, 3, 4):
        sys.monitoring.use_tool_id(tool, "somebody")

# torch is not needed and must not be found. The package itself insists on it, so only its parts are
# loaded.
sys.modules["torch"] = None
package = types.ModuleType("koila")
package.__path__ = find_spec("koila").submodule_search_locations
sys.modules["koila"] = package

from koila import _core  # noqa: E402
from koila.memlab import LineProfiler  # noqa: E402

EXPECTED = """\
## rec

active_bytes hits alloc freed  delta code
         all
        peak
       2.00K    3 0.00B 0.00B  0.00B def rec(n):
       3.00K    3 3.00K 0.00B  3.00K     ev(1024)
       3.00K    3 0.00B 0.00B  0.00B     if n:
       3.00K    2 2.00K 2.00K  0.00B         rec(n - 1)
       3.00K    3 0.00B 3.00K -3.00K     ev(-1024)


## gen

active_bytes hits alloc freed  delta code
         all
        peak
       0.00B    2 0.00B 0.00B  0.00B def gen():
    1000.00B    2 1.95K 0.00B  1.95K     ev(1000)
    1000.00B    2 0.00B 0.00B  0.00B     yield 1
    1000.00B    2 0.00B 0.00B  0.00B     try:
       3.91K    2 5.86K 0.00B  5.86K         ev(3000)
       3.91K    2 0.00B 0.00B  0.00B         yield 2
                                         finally:
       3.91K    2 0.00B 7.81K -7.81K         ev(-4000)


## boom

active_bytes hits  alloc freed  delta code
         all
        peak
       5.00B    1  0.00B 0.00B  0.00B def boom():
      15.00B    1 10.00B 0.00B 10.00B     ev(10)
      15.00B    1  0.00B 0.00B  0.00B     raise ValueError


## main

active_bytes hits  alloc  freed   delta code
         all
        peak
       0.00B    1  0.00B  0.00B   0.00B def main():
       5.00B    1  5.00B  0.00B   5.00B     ev(5)
       5.00B    1  0.00B  0.00B   0.00B     try:
      15.00B    1 10.00B  0.00B  10.00B         boom()
      15.00B    1  0.00B  0.00B   0.00B     except ValueError:
      15.00B    1  0.00B 15.00B -15.00B         ev(-15)
       0.00B    1  0.00B  0.00B   0.00B     return [i for i in range(3)]


## work

active_bytes hits alloc freed  delta code
         all
        peak
       3.00B    3 0.00B 0.00B  0.00B async def work(n):
       7.00B    3 7.00B 0.00B  7.00B     ev(n)
       7.00B    3 0.00B 0.00B  0.00B     await asyncio.sleep(0)
       7.00B    3 0.00B 7.00B -7.00B     ev(-n)
"""


def ev(n):
    _core.memlab_event(0, n)


def rec(n):
    ev(1024)
    if n:
        rec(n - 1)
    ev(-1024)


def gen():
    ev(1000)
    yield 1
    try:
        ev(3000)
        yield 2
    finally:
        ev(-4000)


def boom():
    ev(10)
    raise ValueError


def main():
    ev(5)
    try:
        boom()
    except ValueError:
        ev(-15)
    return [i for i in range(3)]


async def work(n):
    ev(n)
    await asyncio.sleep(0)
    ev(-n)


import asyncio  # noqa: E402
import threading  # noqa: E402

ev(1)
ev(-1)


def run():
    rec(2)
    g = gen()
    next(g)
    ev(100000)
    ev(-100000)
    next(g)
    g.close()
    g = gen()
    next(g)
    next(g)
    try:
        g.throw(KeyError)
    except KeyError:
        pass
    main()

    async def together():
        await asyncio.gather(work(1), work(2), work(4))

    asyncio.run(together())


def table(profiler):
    """The text without its line numbers and with single blanks."""
    numbers = {str(r["line"]) for r in profiler.records()}
    rows = []
    for line in str(
        profiler.display(columns=["active_bytes.all.peak", "hits", "alloc", "freed", "delta"])
    ).splitlines():
        words = line.split()
        drop = (
            "line" if "code" in words else next((w for w in words[:6][::-1] if w in numbers), None)
        )
        if drop in words and not line.startswith("##"):
            words.remove(drop)
        rows.append(" ".join(words))
    return rows


seen = []


def somebody(frame, event, arg):
    seen.append(frame.f_code.co_name)
    return somebody


def on_a_thread():
    thread = threading.Thread(target=lambda: rec(0))
    thread.start()
    thread.join()


if TAKEN:
    sys.settrace(somebody)
with LineProfiler(rec, gen, boom, main, work) as p:
    run()
    if TAKEN:
        same = _core.lines_way() == "tracer" and sys.gettrace() is somebody
        on_a_thread()
        hits = [r["hits"] for r in p.records("rec")]
        same &= hits == [4, 4, 4, 2, 4]
        p.disable()
        p.clear()
if TAKEN:
    same &= (
        sys.gettrace() is somebody
        and {"rec", "gen", "boom"} <= set(seen)
        and threading.gettrace() is None
    )
    sys.settrace(None)
    if not same:
        sys.exit("with all tool ids taken: wrong")
    with LineProfiler(rec, gen, boom, main, work) as p:
        run()
once = table(p)
if TAKEN:  # a tracer sees every turn of a comprehension that is part of its function's code
    once = [
        row.replace("0.00B 4 0.00B", "0.00B 1 0.00B") if "range(3)" in row else row for row in once
    ]
same = once == [" ".join(row.split()) for row in EXPECTED.splitlines()]
with LineProfiler(rec, gen, boom, main, work) as q, LineProfiler(gen):
    run()
same = same and (TAKEN or table(q) == once) and _core.lines_check()
if not same:
    print("\n".join(once))
print(sys.version.split()[0], _core.lines_way())
print(f"{int(same)} passed, {int(not same)} failed")
sys.exit(not same)
