"""A sweep over PyTorch's own operator database: whatever has no rule is gathered, so nothing may be
wrong, and what is refused is listed by name.

By default every operator with one sample and ragged slices; KOILA_LONG=1: four samples, slices
even, ragged and of one row. `tests/python/opinfo_refused.txt` lists what is refused and why;
`python test_opinfo.py --update` writes it.
"""

import json
import os
import subprocess
import sys
import time

import pytest
from conftest import DEVICE, LONG

HERE = os.path.dirname(os.path.abspath(__file__))
LIST = os.path.join(HERE, "opinfo_refused.txt")
N_SHARDS = 8


def sweep(shard, n_samples, kinds):
    """Outcome and reason by operator. The sweep runs in another process; where it dies, the
    operator under test is the one that did it."""
    start, found = 0, {}
    deadline = time.monotonic() + (3000 if LONG else 300)
    while True:
        command = [
            sys.executable,
            os.path.join(HERE, "opinfo_sweep.py"),
            str(shard),
            str(N_SHARDS),
            str(n_samples),
            kinds,
            str(start),
        ]
        try:
            p = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=max(1, deadline - time.monotonic()),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            out, rc, err = p.stdout, p.returncode, p.stderr
        except subprocess.TimeoutExpired as e:
            out, rc, err = (e.stdout or b"").decode(), "timeout", ""
        begun = None
        for line in out.splitlines():
            if not line.startswith("{"):
                continue
            entry = json.loads(line)
            if "begin" in entry:
                begun = entry
            else:
                found[entry["op"]] = (entry["outcome"], entry["why"])
                begun = None
        if begun is None:
            assert rc == 0, f"shard {shard}: rc {rc}\n{err[-2000:]}"
            return found
        found[begun["op"]] = ("crashed", f"rc {rc}")
        if rc == "timeout":
            return found
        start = begun["begin"] + 1


def listed():
    if not os.path.exists(LIST):
        return set()
    with open(LIST) as f:
        return {line.split("\t")[0] for line in f if line.strip() and not line.startswith("#")}


@pytest.mark.parametrize("shard", range(N_SHARDS))
def test_every_operator_is_right_or_refused_by_name(shard):
    found = sweep(shard, 4, "even,ragged,one") if LONG else sweep(shard, 1, "ragged")
    bad = {op: r for op, r in found.items() if r[0] in ("wrong", "crashed", "raised")}
    assert not bad, "\n".join(f"{op}: {r[0]}: {r[1]}" for op, r in bad.items())
    refused = {op: r[1] for op, r in found.items() if r[0] == "refused"}
    unknown = set(refused) - listed()
    assert not unknown, "refused and not in opinfo_refused.txt:\n" + "\n".join(
        f"{op}\t{refused[op]}" for op in sorted(unknown)
    )
    assert sum(r[0] == "same" for r in found.values()) > 0.5 * len(found)


# an index out of range: known only when the values are computed
IN_THE_DATA = {
    "gather",
    "scatter",
    "scatter_add",
}
# aminmax: out= of another dtype, found when it is written; as_strided_scatter: refused
OTHER = {
    "aminmax",
    "as_strided_scatter",
}


@pytest.mark.filterwarnings("ignore")
def test_what_is_an_error_in_eager_is_the_same_error_at_the_same_line():
    """PyTorch's own wrong calls of each operator: wrong shapes, dtypes, dimensions."""
    import opinfo_sweep as one_op

    import koila

    found = {"same": 0}
    for op in one_op.op_db:
        for e in op.error_inputs(DEVICE) if op.error_inputs_func is not None else ():
            t = one_op.first_batched(e.sample_input)
            if t is None:
                continue

            def call(lazily, s=e.sample_input, n=t.shape[0], op=op):
                (x, args, kwargs), _ = one_op.fresh((s.input, s.args, s.kwargs), n, lazily)
                return op(x, *args, **kwargs)

            try:
                call(False)
                continue  # torch no longer minds
            except Exception as eager:
                expected = type(eager), str(eager)[:40]
            try:
                call(True)
                found.setdefault(op.name, "nothing is raised at the call")
            except Exception as ours:
                if (type(ours), str(ours)[:40]) == expected or (
                    type(ours) is expected[0] and not isinstance(ours, koila.KoilaError)
                ):
                    found["same"] += 1
                else:
                    found.setdefault(
                        op.name, f"{type(ours).__name__}: {ours} instead of {expected}"
                    )
    same = found.pop("same")
    assert found.keys() <= IN_THE_DATA | OTHER, found
    assert same > 200


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "op, dtype, relative",
    [
        ("sin", "float64", 1.2e-7),
        ("sin", "float64", 4e-9),
        ("cfloat", "float64", 4e-6),
        ("cov", "float64", 1.2e-7),
        ("sin", "float32", 2e-5),
    ],
)
def test_a_fault_of_the_size_of_the_dtype_s_rounding_is_caught(op, dtype, relative, monkeypatch):
    """What is float64 from end to end is held to float64; what is single precision somewhere, to a
    few of its own roundings."""
    import opinfo_sweep as one_op
    import torch

    info = next(o for o in one_op.op_db if o.name == op)
    sample = next(
        s
        for s in info.sample_inputs(DEVICE, getattr(torch, dtype), requires_grad=True)
        if one_op.first_batched(s) is not None
    )
    assert one_op.one(info, sample, ["even"]) == ("same", "")
    plain = one_op.run

    def faulty(op, sample, n, lazily):
        found = plain(op, sample, n, lazily)
        return [t * (1 + relative) if t is not None and lazily else t for t in found]

    monkeypatch.setattr(one_op, "run", faulty)
    assert one_op.one(info, sample, ["even"])[0] == "wrong"


if __name__ == "__main__":
    results = {}
    for s in range(N_SHARDS):
        results |= sweep(s, 4, "even,ragged,one")
    tally = {}
    for outcome, _ in results.values():
        tally[outcome] = tally.get(outcome, 0) + 1
    print(tally)
    for op, (outcome, why) in sorted(results.items()):
        if outcome in ("wrong", "crashed", "raised"):
            print(f"{outcome}\t{op}\t{why}")
    if "--update" in sys.argv:
        with open(LIST, "w") as f:
            f.write(
                "# operators of torch.testing's op_db that koila refuses (exactly, with an error "
                "of its own), and why\n"
            )
            f.writelines(
                f"{op}\t{why}\n"
                for op, (outcome, why) in sorted(results.items())
                if outcome == "refused"
            )
