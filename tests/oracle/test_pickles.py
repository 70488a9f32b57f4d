"""Whatever Python's picklers write of a snapshot, in any protocol, koila reads the same.

python tests/oracle/test_pickles.py KOILA        the command
"""

import io
import json
import os
import pickle
import subprocess
import sys

DATA = os.path.join(os.path.dirname(__file__), "..", "data")


def variants(d):
    """The same data with everything shared that torch's or Python's writers may share, and with
    nothing shared."""
    yield "plain", d
    frames, stacks = {}, {}

    def shared(x):
        if isinstance(x, dict) and "filename" in x:
            return frames.setdefault(json.dumps(x, sort_keys=True), x)
        if isinstance(x, dict):
            return {k: shared(v) for k, v in x.items()}
        if isinstance(x, list):
            y = [shared(v) for v in x]
            return (
                stacks.setdefault(json.dumps(y, sort_keys=True), y)
                if y and isinstance(y[0], dict) and "filename" in y[0]
                else y
            )
        return x

    yield "shared", shared(d)
    yield "fresh", json.loads(json.dumps(d))
    for kind, frames in (("no", []), ("one", [{"name": "f", "filename": "f.py", "line": 3}])):
        yield f"{kind} frame, in one list", one_list(json.loads(json.dumps(d)), frames)
    again = {"name": "g", "filename": "f.py", "line": 4}
    yield "recursion", one_list(json.loads(json.dumps(d)), [again] * 100)


def one_list(d, frames):
    """torch's C++ code gives a segment and its blocks the same list object."""
    for segment in d["segments"]:
        segment["frames"] = frames
        for block in segment["blocks"]:
            block["frames"] = frames
    return d


def tuples(x):
    if isinstance(x, dict):
        return {k: tuple(v) if k.endswith("pool_id") else tuples(v) for k, v in x.items()}
    return [tuples(v) for v in x] if isinstance(x, list) else x


def writers():
    for protocol in range(6):
        yield f"C, protocol {protocol}", lambda d, p=protocol: pickle.dumps(d, p)

        def pure(d, p=protocol):
            f = io.BytesIO()
            pickle._Pickler(f, p).dump(d)
            return f.getvalue()

        yield f"pure Python, protocol {protocol}", pure


def run(koila):
    def simulate(data):
        r = subprocess.run([koila, "simulate", "-", "--json"], input=data, capture_output=True)
        return json.loads(r.stdout) if r.returncode == 0 else r.stderr.decode()

    failed = passed = 0
    for name in ("step.json",):
        text = open(os.path.join(DATA, name), "rb").read()
        want = simulate(text)
        assert isinstance(want, dict), want
        d = tuples(json.loads(text))
        d["external_annotations"] = [
            {"stage": "START", "name": "step", "device": 0, "time_us": 1000003}
        ]
        for kind, v in variants(d):
            want = simulate(json.dumps(v).encode())
            for writer, write in writers():
                got = simulate(write(v))
                if got == want:
                    passed += 1
                else:
                    failed += 1
                    print(
                        f"FAILED {name}, {kind}, {writer}: "
                        f"{got if isinstance(got, str) else 'reads differently'}"
                    )
    print(f"{passed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]) != 0)
