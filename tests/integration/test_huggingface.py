"""Models of Hugging Face train as in one process, whichever way they are split.

`transformers` is imported by one process, from which all others are forked.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import huggingface
from helpers.huggingface import MODELS, Outcome, apart, samples, train
from helpers.preloaded import Preloaded
from helpers.split_models import launched
from helpers.support import stderr
from helpers.teams import run_spread, run_team
from torch.utils.data import DataLoader

from paceline import Team, UsageError
from paceline.events import Pass, decode
from paceline.tensor_parallel import plan_search
from paceline.tensor_parallel.plans import find_plan

PIPELINE = "pipeline:stages=2,microbatches=2"


@pytest.fixture(scope="module")
def process() -> Iterator[Preloaded]:
    with Preloaded(*(f"transformers.models.{name}.modeling_{name}" for name in huggingface.MODULES)) as process:
        yield process


class Trained(NamedTuple):
    team: list[Outcome]
    alone: Outcome
    said: str
    """Written to stderr by the team."""


def trained(
    strategy: str, workers: int, kind: str, *how: Any, folder: Path | None = None, small: bool = True
) -> Trained:
    """The same training by a team and by one process; how: as for `train`.

    small: False makes the search take tiny layers for large ones, whose shards are worth their communication.
    """
    if not small:
        plan_search._FLOPS, plan_search._LARGE = 1e3, 1
    with stderr() as said:
        team = run_team(train, workers, kind, *how, launch=launched(strategy, folder=folder and str(folder)))
    return Trained(team, train(None, kind, *how), said())


def texts(kind: str) -> dict[str, torch.Tensor]:
    """Tokens and labels of a batch."""
    return {name: torch.stack([one[name] for one in samples(kind, 8)]) for name in ("input_ids", "labels")}


def microbatches(folder: Path) -> set[int]:
    """The microbatches that have passed through the stages of a run."""
    lines = [line for path in (folder / "streams").iterdir() for line in path.read_bytes().splitlines()]
    return {event.microbatch for event in map(decode, lines) if isinstance(event, Pass)}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_computes_its_loss_is_pipelined_in_microbatches(
    process: Preloaded, kind: str, tmp_path: Path
) -> None:
    team, plain, said = process.call(partial(trained, folder=tmp_path), PIPELINE, 2, kind)
    for found in team:
        assert apart(found, plain) < 1e-5
        assert found.output == (plain.output[0], [name for name in plain.output[1] if name != "past_key_values"])
    assert microbatches(tmp_path) == {0, 1}
    assert "not cut into microbatches" not in said
    caches = said.count("no key-value cache (use_cache=False)")
    assert caches == 1 if "past_key_values" in plain.output[1] else caches <= 1, said


@pytest.mark.parametrize(
    ("kind", "workers", "strategy"),
    [
        ("llama", 3, "pipeline:stages=3,microbatches=4"),
        ("t5", 2, "pipeline:stages=2,microbatches=3,schedule=zero-bubble"),
        ("bert", 3, "pipeline:stages=2,workers=1+2,microbatches=4"),
    ],
)
def test_a_loss_that_the_script_computes_from_logits_is_that_of_the_batch(
    process: Preloaded, kind: str, workers: int, strategy: str
) -> None:
    team, plain, _ = process.call(trained, strategy, workers, kind, None, _nothing, False)
    for found in team:
        assert apart(found, plain) < 1e-5


def _nothing(_model: Any) -> None:
    """Changes nothing."""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_dropout_and_activation_checkpointing_leave_a_pipeline_reproducible(process: Preloaded, kind: str) -> None:
    how = (partial(huggingface.gpt2, 0.3) if kind == "gpt2" else None, methodcaller("activation_checkpointing_enable"))
    first, second = (process.call(trained, PIPELINE, 2, kind, *how) for _ in range(2))
    assert apart(first.team[0], second.team[1]) == 0
    distance = apart(first.team[0], first.alone)
    assert distance < 1e-5 if kind == "llama" else distance > 1e-3


# -- split inside of layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "degree"), [*((kind, 2) for kind in MODELS), ("llama", 4), ("t5", 4)])
def test_a_model_that_is_split_inside_of_its_layers_trains_as_in_one_process(
    process: Preloaded, kind: str, degree: int
) -> None:
    """With four workers, the two heads of keys and values of a Llama do not divide."""
    team, plain, _ = process.call(partial(trained, small=False), f"tensor:degree={degree}", degree, kind)
    for found in team:
        assert apart(found, plain) < 1e-5
        assert found.output == plain.output
        process.call(_loads, found.state, kind)


def _loads(state: dict[str, torch.Tensor], kind: str) -> None:
    huggingface.loads(state, MODELS[kind]())


def _columns_and_rows(kind: str) -> dict[str, str]:
    plan_search._FLOPS, plan_search._LARGE = 1e3, 1
    model, inputs = MODELS[kind](), texts(kind)
    names = list(inspect.signature(model.forward).parameters)
    arguments = [inputs.get(name) for name in names[: names.index("labels") + 1]]
    return {name: role.name for name, role in find_plan(model, arguments, 2, None, False).items()}


def test_the_plans_are_those_that_people_write(process: Preloaded) -> None:
    gpt2, llama, t5 = (process.call(_columns_and_rows, kind) for kind in ("gpt2", "llama", "t5"))
    block = {name.removeprefix("transformer.h.0."): role for name, role in gpt2.items() if ".h.0." in name}
    assert block == {"attn.c_attn": "column", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"}
    assert (gpt2["transformer.wte"], gpt2["lm_head"]) == ("vocabulary", "column")
    rows = {name.split(".")[-1] for name, role in llama.items() if role == "row"}
    assert rows == {"o_proj", "down_proj"} and len(llama) == 16
    assert {name.split(".")[-1] for name, role in t5.items() if role == "row"} == {"o", "wo"}


def said_by(process: Preloaded, strategy: str, kind: str, make: Callable[[], Any] | None = None) -> str:
    """Written to stderr by a team of two."""
    said: str = process.call(trained, strategy, 2, kind, make).said
    return said


def test_a_split_of_less_than_half_of_the_parameters_says_what_stayed_whole(process: Preloaded) -> None:
    said = said_by(process, "tensor:degree=2", "mixtral")
    assert said.count("of the parameters are split; whole on every worker: model.layers.0.mlp.experts (") == 1, said
    assert "MixtralExperts is no layer that can be split" in said
    said = said_by(process, "tensor:degree=2", "odd", partial(huggingface.gpt2, words=huggingface.WORDS + 501))
    assert re.search(r"only \d+% of the parameters are split; whole on every worker: transformer.wte", said), said
    assert "whole on every worker" not in said_by(process, "tensor:degree=2", "llama")


def test_a_stage_with_most_of_the_parameters_is_named(process: Preloaded) -> None:
    said = said_by(process, PIPELINE, "gpt2", partial(huggingface.gpt2, words=5000))
    assert re.search(r"stage 0 has 9\d% of the parameters \('transformer.wte.weight' alone has 9\d%\)", said), said


# -- replicas that are split -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("gpt2", "data=2,pipeline=2,microbatches=2"), ("gpt2", "data=2,tensor=2"), ("llama", "data=2,tensor=2")],
)
def test_replicas_with_uneven_numbers_of_tokens_make_the_updates_of_one_process(
    process: Preloaded, kind: str, mesh: str
) -> None:
    team, plain, _ = process.call(trained, f"mesh:{mesh}", 4, kind)
    for found in team:
        # A replica's own losses are those of its part of a batch.
        assert apart(found._replace(losses=plain.losses), plain) < 1e-5


def spread(strategy: str, places: str, kind: str) -> Trained:
    """As `trained`, on pretended machines."""
    return Trained(run_spread(train, places, kind, launch=launched(strategy)), train(None, kind), "")


@pytest.mark.parametrize(
    ("kind", "strategy", "places"),
    [("gpt2", "pipeline:stages=2,microbatches=4", "ab"), ("llama", "mesh:data=2,tensor=2", "aabb")],
)
def test_a_causal_model_trains_over_machines_as_in_one_process(
    process: Preloaded, kind: str, strategy: str, places: str
) -> None:
    team, plain, _ = process.call(spread, strategy, places, kind)
    for found in team:
        assert apart(found._replace(losses=plain.losses), plain) < 1e-5
    assert "data=" in strategy or team[0].losses == pytest.approx(plain.losses, abs=1e-5)


# -- what a split model does not do ----------------------------------------------------------------------------------


def asked(team: Team, kind: str) -> str:
    model: Any = MODELS["llama"]()
    model, _ = team.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {name: torch.stack([one[name] for one in samples("llama", 4)]) for name in ("input_ids", "labels")}
    try:
        if kind == "cache":
            model(**batch, use_cache=True)
        model(**batch).loss.backward()
        with torch.no_grad():
            model.generate(batch["input_ids"], max_new_tokens=2)
    except UsageError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(("kind", "verb"), [("cache", "returns"), ("generate", "is given")])
def test_a_key_value_cache_is_refused_in_a_pipeline(process: Preloaded, kind: str, verb: str) -> None:
    for message in process.call(partial(run_team, launch=launched(PIPELINE)), asked, 2, kind):
        assert re.fullmatch(f"the model {verb} a DynamicCache, a key-value cache, .* with use_cache=False, .*", message)


def generated(team: Team | None) -> list[Any]:
    """Texts that a model continues, with a mask that `generate` finds from the padding."""
    torch.manual_seed(0)
    model: Any = MODELS["llama"]()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(samples("llama"), batch_size=8)  # type: ignore[arg-type]
    if team is not None:
        model, optimizer, loader = team.setup(model, optimizer, loader)
    tokens = texts("llama")["input_ids"]
    with torch.no_grad():
        return [*inspect.signature(model.forward).parameters, *model.generate(tokens, max_new_tokens=3).tolist()]


@pytest.mark.parametrize("strategy", ["tensor:degree=2", PIPELINE])
def test_frameworks_see_the_arguments_of_a_split_model(process: Preloaded, strategy: str) -> None:
    alone = process.call(generated, None)
    for found in process.call(partial(run_team, launch=launched(strategy)), generated, 2):
        assert found == alone


def test_a_mixture_of_experts_with_a_loss_of_the_whole_batch_is_not_cut(process: Preloaded) -> None:
    make = partial(huggingface.mixtral, output_router_logits=True)
    team, plain, said = process.call(trained, PIPELINE, 2, "mixtral", make)
    for found in team:
        assert apart(found, plain) < 1e-5
    assert "a value of the whole batch that is no sum over its samples" in said
