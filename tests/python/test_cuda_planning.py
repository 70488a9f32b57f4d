"""On a GPU slices are chosen by the model of torch's caching allocator, run on the state the
allocator is in. There is no GPU here: `Gpu` stands in for `torch.cuda` with a list of segments, the
tensors stay on the CPU, and an out of memory is the CPU's limit."""

import copy
import itertools
import time
import types

import pytest
import torch
from torch import nn

import koila
from koila import _core, _cuda

pytestmark = pytest.mark.usefixtures("no_default_device")

MIB = 1 << 20
BATCH, WIDTH, WIDE = 256, 64, 8192  # a layer's result is 8 MiB, 32 KiB a row
COUNTED = (  # numbers of the allocator that make up its state
    "allocation",
    "allocated_bytes",
    "active_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)


class Gpu:
    """What koila._cuda asks of torch.cuda. `holes`: bytes of free blocks, each in a segment of its
    own behind one block that is handed out."""

    def __init__(self, monkeypatch, free=1 << 30, holes=()):
        self.free, self.listed, self.segments, self.total = free, 0, [], 1 << 34
        at = 0x7F0000000000
        # the first is cached whole; a small one comes last
        for i, hole in enumerate([20 * MIB, *holes]):
            used = 0 if i == 0 else 2 * MIB
            blocks = [
                {
                    "address": at,
                    "size": used,
                    "requested_size": used,
                    "state": "active_allocated",
                    "frames": [],
                }
            ] * bool(used)
            blocks.append(
                {
                    "address": at + used,
                    "size": hole,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                }
            )
            self.segments.append(self.segment(at, blocks, "large"))
            at += 1 << 30
        self.segments.append(
            self.segment(
                at,
                [
                    {
                        "address": at,
                        "size": 2 * MIB,
                        "requested_size": 0,
                        "state": "inactive",
                        "frames": [],
                    }
                ],
                "small",
            )
        )
        monkeypatch.setattr(_cuda, "index_of", lambda code: 0)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        if _cuda.VERSION >= (2, 15):  # where no workspace is there from an earlier product
            monkeypatch.setattr(_cuda, "_cublas_settings", lambda: (":0:0", "0"))
        for name in (
            "memory_stats_as_nested_dict",
            "mem_get_info",
            "memory_snapshot",
            "current_stream",
            "is_current_stream_capturing",
            "get_device_properties",
            "get_allocator_backend",
            "get_per_process_memory_fraction",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)
        _core.forget()
        self.run_a_product()

    def run_a_product(self):
        """From then on cuBLAS has its workspace, and no step is planned with another one."""
        self.free += 1 << 30  # a state of the allocator that no test has
        (koila.lazy(torch.ones(2, 2)) @ torch.ones(2, 2)).torch()
        self.free -= 1 << 30
        self.listed = 0

    @staticmethod
    def segment(at, blocks, kind):
        size = sum(b["size"] for b in blocks)
        return {
            "device": 0,
            "address": at,
            "total_size": size,
            "stream": 0,
            "segment_type": kind,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def reserved(self):
        return sum(s["total_size"] for s in self.segments)

    def memory_stats_as_nested_dict(self, device=None):
        used = sum(
            b["size"]
            for s in self.segments
            for b in s["blocks"]
            if b["state"] == "active_allocated"
        )
        stats = {
            what: {
                pool: {"current": 0, "peak": 0, "freed": 0}
                for pool in ("all", "small_pool", "large_pool")
            }
            for what in COUNTED
        }
        for pool in ("all", "large_pool"):
            stats["allocated_bytes"][pool].update(current=used, peak=used)
            stats["reserved_bytes"][pool]["current"] = self.reserved()
        return stats

    def mem_get_info(self, device=None):
        return self.free, self.total

    def memory_snapshot(self, mempool_id=None, include_traces=True):
        assert not include_traces
        self.listed += 1
        return copy.deepcopy(
            [*self.segments, {**self.segments[0], "device": 1, "blocks": "another device's"}]
        )

    def current_stream(self, device=None):
        return types.SimpleNamespace(cuda_stream=0)

    def is_current_stream_capturing(self):
        return False

    def get_device_properties(self, device=None):
        return types.SimpleNamespace(
            name='Fake "GPU"', multi_processor_count=108, major=8, minor=0, total_memory=self.total
        )

    def get_allocator_backend(self):
        return "native"

    def get_per_process_memory_fraction(self, device=None):
        return 1.0


@pytest.fixture
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.ReLU(), nn.Linear(WIDE, 1))
    return model, torch.randn(BATCH, WIDTH)


def step(model, x):
    model.zero_grad(set_to_none=True)
    model(koila.lazy(x)).square().mean().backward()
    return koila.last_plan()


def eager_grads(model, x):
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_what_fits_runs_whole_and_says_what_was_predicted(case, monkeypatch):
    model, x = case
    wanted = eager_grads(model, x)
    Gpu(monkeypatch)
    plan = step(model, x)
    assert (
        plan.n_micro_batches == 1
        and plan.fit["fits"]
        and plan.fit["n_simulations"] == 1
        and plan.fit["margin_bytes"] == 0
    )
    assert plan.fit["peak_reserved"] > 3 * 8 * MIB and "reserved" in str(plan)
    assert all(torch.equal(a, p.grad) for a, p in zip(wanted, model.parameters(), strict=True))


def test_the_gpu_that_is_here_can_be_planned_for_by_name(case, monkeypatch):
    """Its memory is the card's, less what others than torch's allocator have taken."""
    model, x = case
    gpu = Gpu(monkeypatch, free=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda,
        "memory_reserved",
        lambda device: gpu.reserved(),
    )
    reserved = gpu.reserved()

    def planned(free, device):
        gpu.free = free
        return koila.plan(lambda x: model(x).square().mean(), x, device=device).prediction

    roomy, tight = (
        planned(gpu.total - reserved, "cuda"),
        planned(gpu.total - reserved - (15 << 30), torch.device("cuda:0")),
    )
    assert roomy["device"] == "Fake GPU" and roomy["fits"]
    assert roomy["spare_bytes"] - tight["spare_bytes"] == 15 << 30


def test_where_there_is_a_gpu_one_amount_is_the_gpu_s_and_the_cpu_has_its_own(monkeypatch):
    """Data sets lie in the CPU's memory. And asking for a budget does not start CUDA, which could
    not be forked afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # whatever ran before
    for name in ("current_device", "mem_get_info", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, lambda *a: pytest.fail("CUDA would start"))
    with koila.budget("1MiB"):
        assert _core.configure()["budget"] == MIB and _core.configure()["cpu_budget"] is None
        torch.zeros(4 * MIB)
    if not _core.cpu_bytes_ok():
        pytest.skip("torch's CPU memory cannot be counted here")
    with koila.budget({"cpu": _core.cpu_bytes_current() + MIB, "cuda": "2GiB"}):
        assert _core.configure()["budget"] == 2 << 30
        with pytest.raises(RuntimeError, match="memory"):
            torch.zeros(4 * MIB)
    assert _core.configure()["budget"] is None and _core.cpu_bytes_get_limit() is None
    torch.zeros(4 * MIB)


def test_free_bytes_in_pieces_are_cut_for_and_gradients_stay(case, monkeypatch):
    """60 holes of 3 MiB: 180 MiB are free, which the sum of live bytes says is far more than
    enough."""
    model, x = case
    wanted = eager_grads(model, x)
    gpu = Gpu(monkeypatch, free=0, holes=[3 * MIB] * 60)
    before = copy.deepcopy(gpu.segments)
    plan = step(model, x)
    assert plan.predicted_peak_bytes < 180 * MIB and plan.fit["fits"] and plan.n_micro_batches > 1
    assert plan.micro_batch * WIDE * 4 <= 20 * MIB
    assert gpu.segments == before and gpu.listed == 1
    for a, p in zip(wanted, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)
    gpu.segments = gpu.segments[:1] + gpu.segments[-1:]  # the same free bytes in one piece
    gpu.free = 180 * MIB
    assert step(model, x).n_micro_batches == 1 and gpu.listed == 2


@pytest.mark.parametrize("hole", [1, 2, 3, 5, 7, 9, 12])
def test_the_choice_is_the_most_rows_of_all_that_fit(case, monkeypatch, hole):
    model, x = case
    Gpu(monkeypatch, free=0, holes=[hole * MIB] * 60)
    chosen = step(model, x)
    fits = {}
    for n in range(1, BATCH + 1):
        rows = -(-BATCH // n)
        if rows in fits:
            continue
        with koila.micro_batch(rows):
            plan = koila.explain(model(koila.lazy(x)).square().mean())
        assert plan.micro_batch == rows and plan.fit["n_simulations"] == 1
        fits[rows] = plan.fit["fits"]
    most = max((rows for rows, yes in fits.items() if yes), default=0)
    assert chosen.fit["fits"] == (most > 0)
    assert not most or chosen.micro_batch == most, fits


def test_cached_blocks_are_used_whatever_fraction_of_the_gpu_torch_may_take(case, monkeypatch):
    """Only new segments count against the fraction: 180 MiB of free blocks stay."""
    model, x = case
    gpu = Gpu(monkeypatch, holes=[3 * MIB] * 60)
    reserved = gpu.reserved()
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device: reserved / 2 / gpu.total
    )
    plan = step(model, x)
    assert plan.fit["fits"] and plan.fit["peak_reserved"] == reserved


def test_a_plan_is_kept_while_the_allocator_is_as_it_was(case, monkeypatch):
    model, x = case
    gpu = Gpu(monkeypatch, free=0, holes=[3 * MIB] * 60)
    first = step(model, x)
    assert step(model, x).micro_batch == first.micro_batch and gpu.listed == 1
    gpu.free = 512 * MIB  # somebody has given back
    whole = step(model, x)
    assert whole.n_micro_batches == 1 and gpu.listed == 2
    gpu.free = 0  # and taken again: the plan is asked about, and another made
    time.sleep(0.11)  # the step needed little, and the driver was asked a moment ago
    again = step(model, x)
    assert again.micro_batch == first.micro_batch and again.fit["fits"] and gpu.listed == 3
    for i in range(20):  # a state that is new in every step
        gpu.free = i * 512
        assert step(model, x).micro_batch == first.micro_batch


def test_a_budget_holds_for_all_that_torch_reserves(case, monkeypatch):
    model, x = case
    gpu = Gpu(monkeypatch)
    reserved = sum(s["total_size"] for s in gpu.segments)
    with koila.budget(reserved + 2 * MIB):
        plan = step(model, x)
    assert (
        plan.n_micro_batches > 1
        and plan.fit["peak_reserved"] <= plan.budget_bytes == reserved + 2 * MIB
    )


def test_running_out_although_it_was_said_to_fit_lowers_the_next_choice(case, monkeypatch):
    model, x = case
    gpu = Gpu(monkeypatch, free=60 * MIB)
    wanted = eager_grads(model, x)
    plain = step(model, x)
    assert plain.n_micro_batches == 1
    start = _core.cpu_bytes_current()
    _core.cpu_bytes_set_limit(start + 16 * MIB)  # what "the GPU" really has left
    try:
        hit = step(model, x)
        assert hit.retries > 0
        for a, p in zip(wanted, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)
        later = [step(model, x) for _ in range(6)]
    finally:
        _core.cpu_bytes_set_limit(None)
    assert (
        later[0].n_micro_batches > 1
        and later[0].fit["margin_bytes"] > 0
        and "kept free" in str(later[0])
    )
    assert later[-1].retries == 0, "it runs out in every step"
    rows = [p.micro_batch for p in later]
    assert rows == sorted(rows, reverse=True)
    assert gpu.listed == 1  # nothing was read again: the state is what it was
    _core.forget()
    assert step(model, x).n_micro_batches == 1


def test_a_step_that_no_slice_fits_is_tried_in_the_smallest(case, monkeypatch):
    model, x = case
    gpu = Gpu(monkeypatch, free=0, holes=[600 * 1024] * 60)
    gpu.segments[0]["blocks"][0].update(state="active_allocated", requested_size=20 * MIB)
    plan = step(model, x)
    assert plan.micro_batch == 1 and not plan.fit["fits"] and "does not fit" in str(plan)


def odd(gpu, what):
    block, segment = gpu.segments[0]["blocks"][0], gpu.segments[0]
    return {
        "no blocks": lambda: segment.pop("blocks"),
        "no size": lambda: block.pop("size"),
        "another word for a state": lambda: block.update(state="asleep"),
        "blocks that leave a gap": lambda: block.update(size=MIB),
        "a state that is no text": lambda: block.update(state=7),
        "an address that is no number": lambda: segment.update(address="here"),
        "segments on top of each other": lambda: gpu.segments.append(segment),
        "a segment that is no dict": lambda: gpu.segments.append(3),
        "no list": lambda: setattr(gpu, "memory_snapshot", None),
    }[what]()


@pytest.mark.parametrize(
    "what",
    [
        "no blocks",
        "no size",
        "another word for a state",
        "blocks that leave a gap",
        "a state that is no text",
        "an address that is no number",
        "segments on top of each other",
        "a segment that is no dict",
    ],
)
def test_a_snapshot_that_makes_no_sense_leaves_the_sum_to_decide(case, monkeypatch, what):
    model, x = case
    gpu = Gpu(monkeypatch, free=0, holes=[3 * MIB] * 60)
    held = gpu.memory_stats_as_nested_dict()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device=None: held)
    odd(gpu, what)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces=True: gpu.segments)
    plan = step(model, x)
    assert plan.fit is None and plan.n_micro_batches == 1 and "reserved" not in str(plan)


@pytest.mark.parametrize(
    "name",
    [
        "memory_stats_as_nested_dict",
        "mem_get_info",
        "memory_snapshot",
        "current_stream",
        "get_device_properties",
        "get_allocator_backend",
    ],
)
def test_what_cannot_be_asked_is_done_without(case, monkeypatch, name):
    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error")

    model, x = case
    Gpu(monkeypatch, holes=[3 * MIB] * 60)
    monkeypatch.setattr(torch.cuda, name, fails)
    assert step(model, x).fit is None


@pytest.mark.parametrize("how", ["back end", "no caching"])
def test_another_allocator_is_not_modelled(case, monkeypatch, how):
    model, x = case
    gpu = Gpu(monkeypatch, free=0, holes=[3 * MIB] * 60)
    if how == "back end":
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    else:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    plan = step(model, x)
    assert plan.fit is None and plan.n_micro_batches == 1 and gpu.listed == 0


def test_snapshots_of_older_and_of_expandable_allocators_are_read(case, monkeypatch):
    model, x = case
    gpu = Gpu(monkeypatch, free=256 * MIB, holes=[3 * MIB] * 60)
    for s in gpu.segments:
        for b in s["blocks"]:
            del b["address"], b["requested_size"]
        del s["segment_pool_id"], s["is_expandable"]
    # without the choice of traces
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: gpu.segments)
    assert step(model, x).fit["fits"]
    gpu = Gpu(monkeypatch, free=256 * MIB)
    at = 0x7E0000000000
    grown = gpu.segment(
        at,
        [{"address": at, "size": 20 * MIB, "requested_size": 0, "state": "inactive", "frames": []}],
        "large",
    )
    gpu.segments.append({**grown, "is_expandable": True})
    plan = step(model, x)
    assert plan.fit["fits"] and plan.n_micro_batches == 1


def test_settings_of_the_allocator_are_read_from_the_environment(case, monkeypatch):
    """With max_split_size_mb the cached block of 200 MiB is not given to a small request: new
    segments are made, and more is reserved."""
    model, x = case
    rows = []
    for conf in ("", "max_split_size_mb:64"):
        gpu = Gpu(monkeypatch, free=100 * MIB)
        block = gpu.segments[0]["blocks"][0]
        block["size"] = gpu.segments[0]["total_size"] = 200 * MIB
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
        rows.append(step(model, x))
    assert rows[0].n_micro_batches == 1 and rows[0].fit["fits"]
    assert rows[1].fit["fits"] and rows[1].fit["peak_allocated"] == rows[0].fit["peak_allocated"]
    assert rows[0].fit["peak_reserved"] == 202 * MIB and rows[1].fit["peak_reserved"] > 220 * MIB


def test_without_a_gpu_nothing_is_asked(case, monkeypatch):
    model, x = case
    for name in ("memory_stats_as_nested_dict", "memory_snapshot", "mem_get_info"):
        monkeypatch.setattr(
            torch.cuda, name, lambda *a, **k: pytest.fail("asked of a GPU that is not there")
        )
    _core.forget()
    assert step(model, x).fit is None
    assert _cuda.index_of(0) == -1 and _cuda.index_of(0x103) == (
        -1 if not torch.cuda.is_initialized() else 3
    )


def test_every_state_has_its_number(monkeypatch):
    """What tells one state of the allocator from another changes with any number that is asked
    for."""
    gpu = Gpu(monkeypatch)
    states = {_cuda.now(0)[3]}
    for pool, what in itertools.product(("small_pool", "large_pool"), COUNTED):
        stats = gpu.memory_stats_as_nested_dict()
        stats[what][pool]["current"] = 12345
        monkeypatch.setattr(
            torch.cuda, "memory_stats_as_nested_dict", lambda device, stats=stats: stats
        )
        states.add(_cuda.now(0)[3])
    assert len(states) == 15
