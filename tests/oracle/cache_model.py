"""The caching allocator once more: slow, small, and written from docs/allocator.md alone. The truth
that src/allocator/cache.c is compared with.

Blocks are Python objects in sorted lists, every rule is a plain loop. `fault` plants one mistake by
name (FAULTS), to prove that the comparison would see it.
"""

MIB = 1 << 20
INF = float("inf")
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEG_ALLOC, SEG_FREE, SEG_MAP, SEG_UNMAP, OOM = range(1, 9)

FAULTS = {
    "large_at_1m": "1 MiB exactly goes to the large pool",
    "segment_at_10m": "10 MiB exactly gets a large_segment",
    "tie_high": "equal blocks: the highest address wins",
    "no_merge_prev": "a freed block is not merged with the one before",
    "no_merge_next": "a freed block is not merged with the one after",
    "small_first": "release-all releases the small pool first",
    "search_after_release": "the free set is searched again after release-all",
    "gc_stops_early": "garbage collection stops within a round",
    "gc_strict_age": "only blocks older than the mean are collected",
    "gc_at_limit": "garbage collection also at reserved == limit",
    "split_at_1m": "a remainder of exactly 1 MiB is split off",
    "split_below_512": "a small remainder of 512 bytes is not split off",
    "no_expandable_walk": "a block counts at its own size, not at what it can grow to",
    "oversize_lt": "r < max_split: a block of exactly max_split is taken",
    "rounding_gt": "a block of exactly r + max_non_split_rounding is taken",
    "split_at_max_split": "r of exactly max_split may be split",
    "available_lt": "release-available: a total of exactly k is not enough",
    "available_le": "release-available: goes on at a total of exactly k",
    "cap_ge": "the cap may not be reached exactly",
    "total_ge": "the device may not be filled exactly",
    "pending_merges": "a pending block is merged with",
    "lifo": "the last freed block completes first",
    "divisions_guard": "rounding by divisions also for small requests",
}


class Block:
    __slots__ = ("addr", "size", "requested", "state", "seg", "born", "uses")

    def __init__(self, addr, size, seg, state="free"):
        self.addr, self.size, self.seg, self.state = addr, size, seg, state
        self.requested, self.born, self.uses = 0, 0, set()


class Segment:
    __slots__ = ("addr", "size", "stream", "small", "expandable", "blocks", "number")

    def __init__(self, addr, size, stream, small, expandable, number):
        self.number = number  # in the order in which segments were made
        self.addr, self.size, self.stream, self.small, self.expandable = (
            addr,
            size,
            stream,
            small,
            expandable,
        )
        self.blocks = []


class Cache:
    def __init__(
        self,
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
        oldest_first=True,
        fault=None,
    ):
        self.oldest_first, self.made = oldest_first, 0
        self.total, self.cap, self.max_split, self.large, self.gc = total, cap, max_split, large, gc
        self.rounding = large if rounding is None else rounding
        self.divisions, self.expandable, self.device, self.best, self.fault = (
            divisions,
            expandable,
            device,
            best,
            fault,
        )
        self.segs, self.pending, self.events, self.handed = [], [], [], {}
        self.searches = {True: 0, False: 0}
        self.next_addr = 0x700000000000
        self.retries = self.ooms = 0
        self.reserved = self.allocated = self.active = 0
        self.peak = {"reserved": 0, "allocated": 0, "active": 0, "split": 0}

    # -- sizes
    def round(self, n):
        if n < 512:
            return 512
        d = self.divisions[min(max(n.bit_length() - 1 - 20, 0), 15)]
        if d > 1 and (n > 512 * d or (self.fault == "divisions_guard" and n > 512)):
            if n & (n - 1) == 0:
                return n
            step = max((1 << (n.bit_length() - 1)) // d, 1)
            return -(-n // step) * step
        return -(-n // 512) * 512

    def is_small(self, r):
        return r < MIB if self.fault == "large_at_1m" else r <= MIB

    def segment_size(self, r):
        if self.is_small(r):
            return 2 * MIB
        if r < 10 * MIB or (self.fault == "segment_at_10m" and r == 10 * MIB):
            return self.large
        return -(-r // (2 * MIB)) * 2 * MIB

    # -- looking
    def free_blocks(self, small, stream=None):
        found = [
            b
            for s in self.segs
            if s.small == small and stream in (None, s.stream)
            for b in s.blocks
            if b.state == "free"
        ]
        return sorted(
            found,
            key=lambda b: (
                b.seg.stream,
                b.size,
                *((0, -b.addr) if self.fault == "tie_high" else (b.seg.number, b.addr)),
            ),
        )

    def new_number(self):
        """Ties go to the oldest segment from torch 2.13 on; before it, by address alone."""
        self.made += self.oldest_first
        return self.made

    def alone(self, b):
        return len(b.seg.blocks) == 1

    def device_bytes(self):
        g = 2 * MIB
        return sum(
            -(-s.size // g) * g
            if not s.expandable
            else sum(b.size for b in s.blocks if b.state != "unmapped")
            for s in self.segs
        )

    def split_bytes(self):
        return sum(
            b.size
            for s in self.segs
            if not s.expandable and len(s.blocks) > 1
            for b in s.blocks
            if b.state == "free"
        )

    def note(self):
        for name, value in (
            ("reserved", self.reserved),
            ("allocated", self.allocated),
            ("active", self.active),
            ("split", self.split_bytes()),
        ):
            self.peak[name] = max(self.peak[name], value)

    def fits(self, n):
        n = -(-n // (2 * MIB)) * 2 * MIB
        if not self.total:
            return True
        return (
            self.device_bytes() + n < self.total
            if self.fault == "total_ge"
            else self.device_bytes() + n <= self.total
        )

    # -- changing
    def merge(self, b):
        blocks = b.seg.blocks
        i = blocks.index(b)
        same = {"free": ("free",), "unmapped": ("unmapped",)}[b.state]
        if self.fault == "pending_merges" and b.state == "free":
            same = ("free", "pending")
        if i and blocks[i - 1].state in same and self.fault != "no_merge_prev":
            prev = blocks.pop(i - 1)
            b.addr, b.size = prev.addr, b.size + prev.size
            i -= 1
            if prev in self.pending:
                self.pending.remove(prev)
        if i + 1 < len(blocks) and blocks[i + 1].state in same and self.fault != "no_merge_next":
            after = blocks.pop(i + 1)
            b.size += after.size
            if after in self.pending:
                self.pending.remove(after)

    def set_free(self, b):
        b.state, b.born = "free", self.searches[b.seg.small]

    def complete(self, b):
        self.events.append((FREE_COMPLETED, b.addr, b.requested))
        size = b.size
        del self.handed[b.addr]
        b.uses, b.requested = set(), 0
        self.set_free(b)
        self.merge(b)
        self.active -= size
        self.note()

    def complete_all(self):
        while self.pending:
            self.complete(self.pending.pop(-1 if self.fault == "lifo" else 0))

    def release_segment(self, b):
        self.events.append((SEG_FREE, b.addr, b.size))
        self.segs.remove(b.seg)
        self.reserved -= b.size

    def unmap(self, b):
        s, page = b.seg, 2 * MIB if b.seg.small else self.large
        lo, hi = (
            s.addr + -(-(b.addr - s.addr) // page) * page,
            s.addr + (b.addr + b.size - s.addr) // page * page,
        )
        if lo >= hi:
            return
        i = s.blocks.index(b)
        parts = []
        if lo > b.addr:
            parts.append(Block(b.addr, lo - b.addr, s))
        middle = Block(lo, hi - lo, s, "unmapped")
        parts.append(middle)
        if hi < b.addr + b.size:
            parts.append(Block(hi, b.addr + b.size - hi, s))
        for p in parts:
            p.born = self.searches[s.small]
        s.blocks[i : i + 1] = parts
        self.merge(middle)
        self.reserved -= hi - lo
        self.events.append((SEG_UNMAP, lo, hi - lo))
        if len(s.blocks) == 1:
            self.segs.remove(s)

    def release_pool(self, small):
        blocks = self.free_blocks(small)
        for b in blocks:
            if not b.seg.expandable and self.alone(b):
                self.release_segment(b)
        for b in blocks:
            if b.seg.expandable:
                self.unmap(b)

    def release_all(self):
        self.complete_all()
        for small in (True, False) if self.fault == "small_first" else (False, True):
            self.release_pool(small)

    def release_available(self, r, small, stream):
        if self.max_split == INF:
            return False
        k = max(r, self.max_split)
        blocks = [
            b for b in self.free_blocks(small, stream) if not b.seg.expandable and self.alone(b)
        ]
        for b in blocks:
            if b.size >= k:
                self.release_segment(b)
                return True
        total = 0
        for b in reversed(blocks):
            done = total > k if self.fault == "available_le" else total >= k
            if done or b.size < self.max_split:
                break
            total += b.size
            self.release_segment(b)
        return total > k if self.fault == "available_lt" else total >= k

    def collect(self):
        limit = int(self.gc * self.cap)
        if self.reserved < limit or (self.reserved == limit and self.fault != "gc_at_limit"):
            return
        target, won = max(self.reserved - limit, 1), 0
        now = self.searches[False]
        left = [b for b in self.free_blocks(False) if self.alone(b) and not b.seg.expandable]
        while won < target and left:
            mean = sum(now - b.born for b in left) / len(left)
            old = [
                b
                for b in left
                if (now - b.born > mean if self.fault == "gc_strict_age" else now - b.born >= mean)
            ]
            for b in old:
                if self.fault == "gc_stops_early" and won >= target:
                    break
                won += b.size
                self.release_segment(b)
            left = [b for b in left if b not in old]
            if not old:
                break

    def search(self, r, small, stream):
        blocks = self.free_blocks(small, stream)
        blocks = [b for b in blocks if b.size >= r]
        if not blocks:
            return None

        def grown(b):
            i = b.seg.blocks.index(b)
            after = b.seg.blocks[i + 1] if i + 1 < len(b.seg.blocks) else None
            return b.size + (after.size if after is not None and after.state == "unmapped" else 0)

        at = 0
        if blocks[0].seg.expandable:
            if self.expandable:
                while (
                    blocks[at].seg.expandable
                    and at + 1 < len(blocks)
                    and grown(blocks[at + 1]) < grown(blocks[at])
                    and self.fault != "no_expandable_walk"
                ):
                    at += 1
            else:
                while at < len(blocks) and blocks[at].seg.expandable:
                    at += 1
                if at == len(blocks):
                    return None
        b = blocks[at]
        over = b.size > self.max_split if self.fault == "oversize_lt" else b.size >= self.max_split
        if r < self.max_split and over:
            return None
        waste = (
            b.size > r + self.rounding
            if self.fault == "rounding_gt"
            else b.size >= r + self.rounding
        )
        if r >= self.max_split and waste:
            return None
        return b

    def map(self, b, size):
        s, page = b.seg, 2 * MIB if b.seg.small else self.large
        n = -(-size // page) * page
        if not self.fits(n):
            return None
        i = s.blocks.index(b)
        mapped = Block(b.addr, n, s)
        self.set_free(mapped)
        parts = [mapped] + ([Block(b.addr + n, b.size - n, s, "unmapped")] if b.size > n else [])
        s.blocks[i : i + 1] = parts
        self.events.append((SEG_MAP, b.addr, n))
        self.merge(mapped)
        self.reserved += n
        self.note()
        return mapped

    def expand(self, r, small, stream):
        page = 2 * MIB if small else self.large
        start = None
        for s in sorted(
            (s for s in self.segs if s.expandable and s.small == small and s.stream == stream),
            key=lambda s: s.addr,
        ):
            for i, b in enumerate(s.blocks):
                if b.state != "unmapped" or start is not None:
                    continue
                first = i - 1 if i and s.blocks[i - 1].state == "free" else i
                room = 0
                for x in s.blocks[first:]:
                    if x.state not in ("free", "unmapped") or room >= r:
                        break
                    room += x.size
                if room >= r:
                    start = s.blocks[first]
        if start is None:
            space = -(-(self.device + self.device // 8) // page) * page
            s = Segment(self.next_addr, space, stream, small, True, self.new_number())
            self.next_addr += -(-space // (2 * MIB)) * 2 * MIB
            start = Block(s.addr, space, s, "unmapped")
            s.blocks.append(start)
            self.segs.append(s)
        if start.state == "unmapped":
            start = self.map(start, min(start.size, r))
        while start is not None and start.size < r:
            after = start.seg.blocks[start.seg.blocks.index(start) + 1]
            start = self.map(after, min(r - start.size, after.size))
        return start

    def over_cap(self, n):
        return bool(self.cap) and (
            self.reserved + n >= self.cap
            if self.fault == "cap_ge"
            else self.reserved + n > self.cap
        )

    def new_segment(self, r, small, stream):
        n = self.segment_size(r)
        if self.over_cap(n):
            return None
        if self.expandable:
            return self.expand(r, small, stream)
        if not self.fits(n):
            return None
        s = Segment(self.next_addr, n, stream, small, False, self.new_number())
        self.next_addr += -(-n // (2 * MIB)) * 2 * MIB
        s.blocks.append(Block(s.addr, n, s))
        self.segs.append(s)
        self.reserved += n
        self.events.append((SEG_ALLOC, s.addr, n))
        return s.blocks[0]

    # -- what a program does
    def malloc(self, n, stream):
        if self.best:
            self.complete_all()
        r = self.round(n)
        small = self.is_small(r)
        if self.cap and self.gc > 0:
            self.searches[small] += 1
        b = self.search(r, small, stream)
        if b is None:
            if self.cap and self.gc > 0:
                self.collect()
            b = self.new_segment(r, small, stream)
            if b is None and self.release_available(r, small, stream):
                b = self.new_segment(r, small, stream)
            if b is None:
                self.release_all()
                if self.fault == "search_after_release":
                    b = self.search(r, small, stream)
                if b is None:
                    self.retries += 1
                    b = self.new_segment(r, small, stream)
            if b is None:
                self.ooms += 1
                self.events.append((OOM, 0, r))
                return None
        rest = b.size - r
        if small or self.expandable:
            split = rest > 512 if self.fault == "split_below_512" else rest >= 512
        else:
            may = r <= self.max_split if self.fault == "split_at_max_split" else r < self.max_split
            split = may and (rest >= MIB if self.fault == "split_at_1m" else rest > MIB)
        if split:
            high = Block(b.addr + r, rest, b.seg)
            self.set_free(high)
            b.size = r
            b.seg.blocks.insert(b.seg.blocks.index(b) + 1, high)
        b.state, b.requested = "used", n
        self.handed[b.addr] = b
        self.events.append((ALLOC, b.addr, n))
        self.allocated += b.size
        self.active += b.size
        self.note()
        return b.addr

    def record_stream(self, addr, stream):
        if self.handed[addr].seg.stream != stream:
            self.handed[addr].uses.add(stream)

    def release(self, addr):
        b = self.handed[addr]
        self.allocated -= b.size
        self.events.append((FREE_REQUESTED, b.addr, b.requested))
        if b.uses:
            b.state = "pending"
            self.pending.append(b)
        else:
            self.complete(b)

    def sync(self):
        self.complete_all()

    def empty(self):
        self.release_all()
