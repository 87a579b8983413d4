"""Tiny models of Hugging Face with random weights, batches with padding for them, and the loop that trains them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from paceline import Team


class _Transformers:
    """`transformers`, which is imported when it is used: by no process that only collects tests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("transformers"), name)


hf: Any = _Transformers()
WORDS, LENGTH, ANSWER, PAD = 48, 10, 6, 1
"""Size of the vocabulary, lengths of texts and answers, and the token that pads them."""
_CAUSAL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,  # gpt2 and llama have two: a trace takes its time for every one
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": PAD,
}
_GROUPED: dict[str, Any] = {**_CAUSAL, "intermediate_size": 32, "num_key_value_heads": 2, "use_cache": True}
_TWO_SIDED: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def gpt2(dropout: float = 0.0, words: int = WORDS) -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=words,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def t5(form: str = "relu", tied: bool = True) -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj=form,
            tie_word_embeddings=tied,
            decoder_start_token_id=0,
            pad_token_id=PAD,
        )
    )


def opt() -> Any:
    shape = {**_CAUSAL, "ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0}
    return hf.OPTForCausalLM(hf.OPTConfig(**shape))


def bert() -> Any:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape = {**_CAUSAL, "intermediate_size": 32, "num_labels": 3, **quiet}
    return hf.BertForSequenceClassification(hf.BertConfig(**shape))


def vit() -> Any:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def whisper() -> Any:
    shape = {**_TWO_SIDED, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**shape))


def mixtral(**more: Any) -> Any:
    shape = {**_GROUPED, "num_local_experts": 4, **more}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**shape))


def mamba() -> Any:
    shape: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "state_size": 2, "num_hidden_layers": 1}
    return hf.MambaForCausalLM(hf.MambaConfig(**shape, time_step_rank=2, pad_token_id=PAD))


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**{**_GROUPED, "num_hidden_layers": 2})),
    "qwen": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GROUPED, tie_word_embeddings=True)),
    "opt": opt,
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_CAUSAL, intermediate_size=32)),
    "bert": bert,
    "t5": t5,
    "gated t5": lambda: t5("gated-gelu", tied=False),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_TWO_SIDED, max_position_embeddings=16)),
    "vit": vit,
    "whisper": whisper,
    "mixtral": mixtral,
    "mamba": mamba,
}
MODULES = ["gpt2", "llama", "qwen2", "opt", "gpt_neox", "bert", "t5", "bart", "vit", "whisper", "mixtral", "mamba"]
"""Of `transformers.models`, those of the models."""
TWO_SIDED = ("t5", "gated t5", "bart", "whisper")


def samples(kind: str, count: int = 24) -> list[dict[str, torch.Tensor]]:
    """Texts of uneven lengths: the means of their losses are over uneven numbers of tokens."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        tokens = torch.randint(3, WORDS, (LENGTH,), generator=draw)
        kept = torch.arange(LENGTH) < (LENGTH if number % 4 == 0 else 2 + 3 * number % 7)
        answer = torch.randint(3, WORDS, (ANSWER,), generator=draw)
        answer = torch.where(torch.arange(ANSWER) < 1 + number % ANSWER, answer, -100)
        text = {"input_ids": torch.where(kept, tokens, PAD), "attention_mask": kept.long()}
        if kind == "vit":
            found.append({"pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": tokens[0] % 3})
        elif kind == "whisper":
            found.append({"input_features": torch.randn(4, 16, generator=draw), "labels": answer})
        elif kind == "bert":
            found.append({**text, "labels": tokens[0] % 3})
        else:
            found.append({**text, "labels": answer if kind in TWO_SIDED else torch.where(kept, tokens, -100)})
    return found


class Outcome(NamedTuple):
    losses: list[float]
    state: dict[str, torch.Tensor]
    output: tuple[str, list[str]]
    """Class and fields of what the model returned."""


def outside(model: Any, batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """The loss that a script computes from the logits."""
    labels = batch.pop("labels")
    given = {"decoder_input_ids": labels.clamp(PAD)} if labels.shape[-1] == ANSWER else {}
    output = model(**batch, **given)
    if output.logits.dim() == 2:
        return output, functional.cross_entropy(output.logits, labels)
    return output, functional.cross_entropy(output.logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def train(
    team: Team | None,
    kind: str,
    make: Callable[[], Any] | None = None,
    change: Callable[[Any], object] = lambda _: None,
    inside: bool = True,
    batch: int = 8,
) -> Outcome:
    """inside: True if the model computes the loss; change: applied to the model before setup."""
    torch.manual_seed(0)
    model: Any = (make or MODELS[kind])()
    model.train()
    change(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(samples(kind), batch_size=batch)  # type: ignore[arg-type]
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    losses: list[float] = []
    output: Any = None
    for inputs in loader:
        output, loss = ((made := model(**inputs)), made.loss) if inside else outside(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return Outcome(losses, state, (type(output).__name__, list(output)))


def apart(ours: Outcome, plain: Outcome) -> float:
    """The largest difference of a loss or of a weight."""
    assert list(ours.state) == list(plain.state)
    weights = [float((ours.state[name] - value).abs().max()) for name, value in plain.state.items()]
    return max(*weights, *(abs(one - other) for one, other in zip(ours.losses, plain.losses, strict=True)))


def loads(state: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Loads a split model's state into a plain one, of which nothing may be missing."""
    missing, unknown = model.load_state_dict(state)
    assert not missing and not unknown
