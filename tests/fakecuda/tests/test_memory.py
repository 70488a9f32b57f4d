"""How much memory the simulated device has left."""

import os
import subprocess
import sys

PROGRAM = """
import sys, torch
others = sys.argv[1]
def say(size):
    with open(others, "w") as f:
        f.write(size)
free = lambda: torch.cuda.mem_get_info()[0] >> 20
before = free()
say("300MiB")
assert free() == before - 300, free()
x = torch.empty((before - 310) << 20, dtype=torch.uint8, device="cuda")
del x
torch.cuda.empty_cache()
say("320MiB")
try:
    torch.empty((before - 310) << 20, dtype=torch.uint8, device="cuda")
    raise SystemExit("others had that memory")
except torch.OutOfMemoryError:
    pass
say("900GiB")  # more than there is: nothing is left
assert free() == 0
say("0")
assert free() == before
"""


def test_other_processes_take_memory_while_a_program_runs(tmp_path):
    env = {**os.environ, "FAKECUDA_MEMORY": "2GiB", "FAKECUDA_OTHERS": str(tmp_path / "others")}
    run = [sys.executable, "-c", PROGRAM, env["FAKECUDA_OTHERS"]]
    subprocess.run(run, check=True, env=env, cwd=tmp_path, timeout=120)
