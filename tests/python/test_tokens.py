"""The tokens of a sequence are the batch: `lazy(ids, labels, batch=1)`. Fused attention cuts its
queries; keys and values are gathered, and nothing else of a layer is."""

import contextlib

import pytest
import torch
import zoo
from conftest import DEVICE
from helpers import EVEN, ONE, RAGGED, WHOLE, compare_programs, step_program
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import koila
from koila import lazy

B, T = 2, 32  # sequences, tokens: the efficient kernel pads its logsumexp to a multiple of 32
SLICES = (WHOLE, EVEN, RAGGED, ONE)

# Of each kernel: itself, a type that it takes, and the tolerance of sums of that type in slices.
KERNELS = {"cpu": (None, torch.float64, 1e-12)}
if DEVICE == "cuda":
    KERNELS = {
        "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 5e-2),
        "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 5e-5),
        "math": (SDPBackend.MATH, torch.float64, 1e-12),
    }


def mistral(**kw):
    hf = pytest.importorskip("transformers")
    size = zoo.LAYERS | dict(vocab_size=31, max_position_embeddings=T, use_cache=False)
    return hf.MistralForCausalLM(hf.MistralConfig(**(size | dict(sliding_window=5) | kw)))


MASKED = "a sliding window"
SIZE = dict(hidden_size=32, num_attention_heads=4, intermediate_size=24)
MODELS = {
    "gpt2": lambda: zoo.gpt2(n_positions=T, n_embd=32, n_head=4),
    "llama": lambda: zoo.llama(**SIZE, max_position_embeddings=T, num_key_value_heads=2),
    MASKED: lambda: mistral(**SIZE, num_key_value_heads=2),
}


def next_token(model, ids, labels):
    return F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())


def program(model, dtype):
    torch.manual_seed(0)
    ids, labels = torch.randint(0, 31, (2, B, T)).unbind()
    return step_program(lambda: model().to(dtype), lambda: (ids, labels), next_token)


# flash attention takes no mask, the efficient kernel no heads that share keys
REFUSED = {(MASKED, "flash"), ("llama", "efficient")}
CASES = [(name, kernel) for name in MODELS for kernel in KERNELS if (name, kernel) not in REFUSED]


@pytest.mark.parametrize("name, kernel", CASES)
def test_sliced_tokens_equal_eager(name, kernel):
    backend, dtype, tol = KERNELS[kernel]
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        slices = SLICES if dtype is torch.float64 else (WHOLE, EVEN, RAGGED)
        compare_programs(program(MODELS[name], dtype), T, slices, tol, batch=1)
    operators = {g.operator for g in koila.last_plan().gathers}
    if backend is not SDPBackend.MATH:
        assert operators and all("attention" in o or "query_rows" in o for o in operators), (
            operators
        )


@pytest.mark.about_the_cpu("of its kernel")
@pytest.mark.parametrize("keys", [8, 5, 13])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_not_cut(keys, causal):
    """Also fewer and more of them than queries."""
    torch.manual_seed(2)
    q = torch.randn(B, 3, 8, 8, dtype=torch.float64)
    k, v = torch.randn(2, B, 3, keys, 8, dtype=torch.float64)

    def program(wrap):
        kv = [t.clone().requires_grad_() for t in (k, v)]
        x = q.clone()
        weight = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)
        out = F.scaled_dot_product_attention(wrap(x) @ weight, *kv, is_causal=causal, scale=0.3)
        loss = out.pow(2).mean()
        loss.backward()
        grads = {f"grad:{n}": t.grad for n, t in zip("kvw", (*kv, weight))}
        return {"loss:loss": koila.run(loss).detach(), **grads}

    compare_programs(program, 8, tol=1e-12, batch=2)
    assert not koila.last_plan().gathers


@pytest.mark.about_the_cpu("of its kernel")
def test_half_precision_is_as_accurate_as_eager():
    """A causal slice merges two results, each rounded to bfloat16."""
    torch.manual_seed(3)
    q, k, v = torch.randn(3, B, 3, 64, 16).bfloat16()
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), is_causal=True)
    eager = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with koila.micro_batch(8):
        got = F.scaled_dot_product_attention(lazy(q, batch=2), k, v, is_causal=True).torch()
    assert koila.last_plan().n_micro_batches == 8
    errors = [(t.double() - exact).square().mean().sqrt().item() for t in (eager, got)]
    assert errors[1] <= 1.5 * errors[0], errors


def test_terms_of_a_sum_that_lie_far_apart_are_made_whole_first():
    """The gradient of a tied embedding: its terms come from the first and the last loop of the
    backward. Were they added slice by slice, the last loop would run the output layer again."""
    torch.manual_seed(0)
    ids = torch.randint(0, 31, (1, T))

    def ratio(tied):
        model = zoo.gpt2(n_positions=T, n_embd=16, tie_word_embeddings=tied).double()
        with koila.micro_batch(8):
            x, y = lazy(ids, ids, batch=1)
            next_token(model, x, y).backward()
        return koila.last_plan().replay_ratio

    assert ratio(True) <= 1.05 * ratio(False)
