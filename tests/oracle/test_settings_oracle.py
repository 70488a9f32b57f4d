"""The configuration string: koila takes what torch's own parser takes, and refuses what it refuses.

python tests/oracle/test_settings_oracle.py LIBKOILA.so [strings]
    needs torch >= 2.13 (a CPU build will do)
"""

import ctypes as C
import os
import random
import sys

sys.path.insert(0, os.path.dirname(__file__))
from test_cache_oracle import Config, load

FIXED = [
    "max_split_size_mb:30garbage",
    "max_split_size_mb:19",
    "max_split_size_mb:20",
    "max_split_size_mb: 40",
    "max_split_size_mb:30,",
    "large_segment_size_mb:10",
    "large_segment_size_mb:12",
    "large_segment_size_mb:600",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[3:4]",
    "roundup_power2_divisions:[256:3]",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:0.5",
    "expandable_segments:true",
    "expandable_segments:True",
    "expandable_segments:False",
    "expandable_segments:1",
    "",
]


def random_string(rng):
    key = rng.choice(
        [
            "max_split_size_mb",
            "large_segment_size_mb",
            "garbage_collection_threshold",
            "expandable_segments",
            "roundup_power2_divisions",
        ]
    )
    number = str(rng.choice([0, 1, 2, 3, 4, 8, 10, 11, 12, 16, 19, 20, 21, 64, 100, 256, 1000]))
    value = {
        "garbage_collection_threshold": rng.choice(
            ["0.1", "0.9", "1.0", "0.0", "1.5", ".5", "0.25"]
        ),
        "expandable_segments": rng.choice(["True", "False", "true", "0", "Yes"]),
        "roundup_power2_divisions": rng.choice(
            [
                number,
                "["
                + ",".join(
                    rng.choice(["1", "2", "256", "512", "3"])
                    + ":"
                    + rng.choice(["0", "1", "2", "4", "8", "3"])
                    for _ in range(rng.randint(1, 3))
                )
                + rng.choice(["", ",>:4"])
                + "]",
            ]
        ),
    }.get(key, number)
    return f"{rng.choice(['', ' '])}{key}:{rng.choice(['', ' '])}{value}"


def run(lib, n):
    import torch

    wrong = []
    lib.koila_cache_config_parse.argtypes = [C.POINTER(Config), C.c_char_p, C.c_int, C.c_void_p]
    rng = random.Random(7)
    for text in FIXED + [random_string(rng) for _ in range(n)]:
        torch._C._accelerator_setAllocatorSettings(
            "max_split_size_mb:4096,large_segment_size_mb:20"
        )
        try:
            torch._C._accelerator_setAllocatorSettings(text)
            theirs = True
        except (ValueError, RuntimeError):
            theirs = False
        conf = Config()
        assert lib.koila_cache_config_init(C.byref(conf), b"2.13") == 0
        ours = lib.koila_cache_config_parse(C.byref(conf), text.encode(), 0, None) == 0
        if ours != theirs:
            wrong.append(f"{text!r}: torch {'takes' if theirs else 'refuses'} it")
    return wrong


if __name__ == "__main__":
    try:
        import torch

        assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    except (ImportError, AssertionError):
        print("no torch >= 2.13 here")
        sys.exit(77)
    wrong = run(load(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
    print("\n".join(sorted(set(wrong))))
    print(f"{'0 passed, 1' if wrong else '1 passed, 0'} failed")
    sys.exit(bool(wrong))
