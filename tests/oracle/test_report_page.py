"""The page of a recording of a million events opens in a real browser: whole, readable, dark where
the reader's screen is, and no larger than 5 MiB.

    python tests/oracle/test_report_page.py KOILA
        exit status 77 (skipped) where there is no browser that starts

Prints how long the browser took; that is not judged here, for a test machine may be busy.
"""

import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib

N_STEPS, PER_STEP = 334, 1000


def text(s):
    return b"X" + struct.pack("<I", len(s)) + s.encode()


def number(v):
    return b"\x8a\x08" + struct.pack("<Q", v)


def recording():
    """Steps of 1,000 allocations of 1,000 bytes, freed in reverse: 3,000 events each, with the same
    addresses every time."""
    base = 0x7F0000000000
    frames = (
        text("frames")
        + b"](}("
        + text("name")
        + text("forward")
        + text("filename")
        + text("train.py")
        + text("line")
        + b"K\x07u"
        + b"e"
    )

    def entry(action, addr, size):
        return (
            b"}("
            + text("action")
            + text(action)
            + text("addr")
            + number(addr)
            + text("size")
            + number(size)
            + text("stream")
            + b"K\x00"
            + frames
            + b"u"
        )

    at = [base + 1024 * i for i in range(PER_STEP)]
    step = b"".join(entry("alloc", a, 1000) for a in at)
    step += b"".join(
        entry("free_requested", a, 1000) + entry("free_completed", a, 1000) for a in reversed(at)
    )
    block = (
        b"}("
        + text("address")
        + number(base)
        + text("size")
        + number(2 << 20)
        + text("requested_size")
        + b"K\x00"
        + text("state")
        + text("inactive")
        + b"u"
    )
    segment = (
        b"}("
        + text("device")
        + b"K\x00"
        + text("address")
        + number(base)
        + text("total_size")
        + number(2 << 20)
        + text("stream")
        + b"K\x00"
    )
    segment += text("segment_type") + text("small") + text("blocks") + b"](" + block + b"eu"
    head = (
        b"\x80\x02}(" + text("segments") + b"](" + segment + b"e" + text("device_traces") + b"](]("
    )
    return head + entry("segment_alloc", base, 2 << 20) + step * N_STEPS + b"eeu."


def corner(png):
    """Red, green and blue of a picture's first pixel."""
    data, i = b"", 8
    while i < len(png):
        (n,) = struct.unpack(">I", png[i : i + 4])
        if png[i + 4 : i + 8] == b"IDAT":
            data += png[i + 8 : i + 8 + n]
        i += 12 + n
    return tuple(zlib.decompress(data)[1:4])


def main(koila):
    browser = next(
        (b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None
    )
    if not browser:
        print("skipped: no browser here")
        return 77
    with tempfile.TemporaryDirectory() as folder:

        def browse(page, *how):
            start = time.monotonic()
            done = subprocess.run(
                [
                    browser,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    f"--user-data-dir={folder}/profile",
                    *how,
                    f"file://{folder}/{page}",
                ],
                capture_output=True,
                timeout=120,
            )
            return done.stdout.decode(), time.monotonic() - start

        with open(f"{folder}/million.pickle", "wb") as f:
            f.write(recording())
        subprocess.run(
            [
                koila,
                "report",
                f"{folder}/million.pickle",
                "-o",
                f"{folder}/page.html",
                "--torch",
                "2.10",
                "--memory",
                "3MiB",
            ],
            check=True,
        )
        n_bytes = os.path.getsize(f"{folder}/page.html")
        assert n_bytes <= 5 << 20, n_bytes
        dom, page_s = browse("page.html", "--dump-dom")
        if not dom.strip():
            with open(f"{folder}/blank.html", "w", encoding="utf-8") as f:
                f.write("<p>blank")
            if "blank" not in browse("blank.html", "--dump-dom")[0]:
                print("skipped: the browser does not start")
                return 77
        for want in (
            "1,002,001 events",
            "Replay: <b>exact</b>",
            "<title>reserved</title>",
            "limit 3.00 MiB",
            "train.py:7",
            "koila 0.",
        ):
            assert want in dom, want
        assert dom.count("<svg") == 3 and dom.rstrip().endswith("</html>")
        shade = []
        for dark in (True, False):
            browse(
                "page.html",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                "--window-size=900,600",
                f"--screenshot={folder}/shot.png",
            )
            with open(f"{folder}/shot.png", "rb") as f:
                shade.append(sum(corner(f.read())))
        assert shade[0] < 150 < 600 < shade[1], shade
        print(f"{n_bytes} bytes; opened in {page_s:.1f} s")
    print("1 passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
