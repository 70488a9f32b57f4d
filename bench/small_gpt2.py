"""A GPT-2 of a given size, with random weights. For the programs beside it."""

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel


def small_gpt2(
    n_layer: int,
    n_head: int,
    n_embd: int,
    vocab_size: int,
    n_positions: int,
    dropout: float = 0.0,
) -> Any:
    """The model, with a head for the next token, set to train. Sizes as in `GPT2Config`."""
    config = GPT2Config(
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        vocab_size=vocab_size,
        n_positions=n_positions,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).train()
