"""CUDA graphs on the simulated device: a capture computes nothing, a replay computes over the same
memory, and what CUDA forbids inside a capture is refused in CUDA's words."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

D = torch.float64
FORBIDDEN = (
    "operation not permitted when stream is capturing|previous error during capture"
    "|during CUDA graph capture"
)


def captured(program, warm_up=True, **options):
    """A graph of `program` and what it returned when it was captured."""
    if warm_up:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            program()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        out = program()
    return graph, out


# ---- numbers


def test_a_capture_computes_nothing_and_a_replay_does():
    x, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def program():
        total.add_(x)
        return total * 2

    graph, out = captured(program, warm_up=False)
    assert total.eq(0).all()
    for n in (1, 2, 3):
        graph.replay()
        assert total.eq(n).all() and out.eq(2 * n).all()


def test_inputs_changed_in_between_give_new_results():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten())
    net.append(nn.Linear(4 * 36, 5))
    net = net.double()
    there = copy.deepcopy(net).cuda().eval()
    x = torch.zeros(2, 3, 8, 8, device="cuda", dtype=D)
    with torch.no_grad():
        graph, out = captured(lambda: there(x))
        for _ in range(3):
            batch = torch.randn(2, 3, 8, 8, dtype=D)
            x.copy_(batch)
            graph.replay()
            torch.testing.assert_close(out.cpu(), net.eval()(batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_whole_step_in_a_graph_trains_as_on_the_cpu(kind):
    def optimizer(m, **options):
        if kind == "sgd":
            return torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)
        return torch.optim.Adam(m.parameters(), 0.01, **options)

    tolerance = 1e-10 if kind == "sgd" else 1e-5  # a capturable Adam corrects in float32

    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()
    there = copy.deepcopy(here).cuda()
    a, b = optimizer(here), optimizer(there, capturable=True)
    batches = [(torch.randn(8, 6, dtype=D), torch.randint(0, 3, (8,))) for _ in range(7)]
    x, y = (t.cuda() for t in batches[0])

    def step(model, o, x, y):
        o.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        o.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(there, b, x, y)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        step(here, a, *batches[0])
    graph = torch.cuda.CUDAGraph()
    b.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step(there, b, x, y)
    for batch in batches[1:]:
        x.copy_(batch[0])
        y.copy_(batch[1])
        graph.replay()
        torch.testing.assert_close(
            loss.item(), step(here, a, *batch).item(), rtol=tolerance, atol=0
        )
    for p, q in zip(here.parameters(), there.parameters()):
        torch.testing.assert_close(p, q.cpu(), rtol=tolerance, atol=tolerance)


def test_make_graphed_callables():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    plain, graphed = copy.deepcopy(net), net.cuda()
    graphed = torch.cuda.make_graphed_callables(graphed, (torch.randn(8, 6, dtype=D).cuda(),))
    a, b = (torch.optim.SGD(m.parameters(), 0.1) for m in (plain, graphed))
    for _ in range(3):
        x, y = torch.randn(8, 6, dtype=D), torch.randint(0, 3, (8,))
        for model, o, d in ((plain, a, "cpu"), (graphed, b, "cuda")):
            o.zero_grad()
            F.cross_entropy(model(x.to(d)), y.to(d)).backward()
            o.step()
    for p, q in zip(plain.parameters(), graphed.parameters()):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-11, atol=1e-13)


def test_random_numbers_of_replays_are_those_of_eager_steps():
    x = torch.ones(64, device="cuda")

    def program():
        return F.dropout(x, 0.5), torch.rand(5, device="cuda"), torch.randn(5, device="cuda")

    torch.manual_seed(5)
    expected = [[t.clone() for t in program()] for _ in range(3)]
    after = torch.cuda.default_generators[0].get_offset()
    graph, out = captured(program)
    torch.manual_seed(5)
    for step in expected:
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(step, out))
    assert torch.cuda.default_generators[0].get_offset() == after
    assert not torch.equal(expected[0][1], expected[1][1])


def test_streams_that_join_the_capture():
    x = torch.arange(4.0, device="cuda")
    side = torch.cuda.Stream()

    def program():
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            y = x * 3
        here.wait_stream(side)
        return y + 1

    graph, out = captured(program)
    x.add_(1)
    graph.replay()
    assert out.tolist() == [4, 7, 10, 13]


def test_pinned_memory_is_read_and_written_by_replays():
    source, target = (torch.zeros(4).pin_memory() for _ in range(2))
    there = torch.zeros(4, device="cuda")

    def program():
        there.copy_(source, non_blocking=True)
        target.copy_(there * 2, non_blocking=True)

    graph, _ = captured(program, warm_up=False)
    source.fill_(3)
    assert target.eq(0).all()
    graph.replay()
    assert target.eq(6).all()


# ---- what a capture forbids


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize(
    "what",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().query(),
        lambda x: x.to_sparse(),
    ],
    ids=["item", "cpu", "nonzero", "device", "stream", "query", "sparse"],
)
def test_waiting_for_what_is_captured_is_refused(mode, what):
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=FORBIDDEN):
        with torch.cuda.graph(graph, capture_error_mode=mode):
            what(x * 2)
    assert (x + 1).sum().item() == 8  # the stream is free again


def test_an_error_that_is_swallowed_comes_back_when_the_capture_ends():
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="previous error during capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                (x * 2).sum().item()


def test_an_event_of_a_capture_cannot_be_waited_for():
    event = torch.cuda.Event()
    with pytest.raises(RuntimeError, match="capturing stream|previous error"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            event.record()
            event.synchronize()


def test_work_that_is_not_joined_is_refused():
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="unjoined"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x * 2


def test_waiting_for_work_outside_of_the_capture_is_refused():
    event = torch.cuda.Event()
    event.record()
    with pytest.raises(RuntimeError, match="uncaptured work|previous error"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            event.wait()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_unsafe_calls_by_mode(mode, elsewhere):
    """cudaMalloc: forbidden to every thread in a global capture, to its own in a thread-local one,
    to none in a relaxed one."""
    import ctypes

    cudart = ctypes.CDLL("libcudart.so.13")  # torch has loaded it
    result = []

    def allocate():
        p = ctypes.c_void_p()
        result.append(cudart.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(512)))
        if result[0] == 0:
            cudart.cudaFree(p)

    forbidden = mode == "global" or (mode == "thread_local" and not elsewhere)
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph, capture_error_mode=mode):
            x.add_(1)
            if elsewhere:
                thread = threading.Thread(target=allocate)
                thread.start()
                thread.join()
            else:
                allocate()

    if forbidden:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            capture()
    else:
        capture()
        graph.replay()
        assert x.eq(2).all()
    assert result == [900 if forbidden else 0]
    cudart.cudaGetLastError()


def test_an_empty_capture_is_told():
    with pytest.warns(UserWarning, match="CUDA Graph is empty"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
