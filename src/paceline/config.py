"""What a run is: strategy specs, timeouts, slowness put on for a test; parsed and checked here, once."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from paceline.errors import UsageError

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait, in seconds. Every wait in Paceline ends by one of these."""

    join: Positive = 120.0
    """Until all members of the team are there, once this one is."""
    barrier: Positive = 300.0
    """For the other workers, at an update, a barrier or the start of an epoch."""
    notice: Positive = 5.0
    """After which a waiting worker says for whom it waits."""
    stop: Positive = 2.0
    """For the others to end by themselves after one has failed, before they are told to."""


# -- strategies ------------------------------------------------------------------------------------------------------


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """How a team trains a model. A subclass names itself and its options; options are its attributes."""

    spec: ClassVar[str] = ""

    def __str__(self) -> str:
        options = ",".join(
            f"{field.encode_name}={getattr(self, field.name)}"
            for field in msgspec.structs.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{self.spec}:{options}" if options else self.spec


class AllReduce(Strategy, frozen=True, kw_only=True):
    """Every worker contributes its gradient to one mean, and all go on with the same new version."""

    spec: ClassVar[str] = "all-reduce"
    topology: str = "auto"
    """The shape that messages between machines take; inside a machine gradients meet in shared memory."""


TOPOLOGIES = ("auto", "ring", "tree", "halving-doubling", "hub", "direct")
"""Of an all-reduce between machines."""


class Sync(Strategy, frozen=True, kw_only=True):
    """A parameter server that updates once all workers have pushed."""

    spec: ClassVar[str] = "sync"


class KSync(Strategy, frozen=True, kw_only=True):
    """It updates once K workers have pushed; the others are cancelled."""

    spec: ClassVar[str] = "k-sync"
    k: int


class KBatchSync(Strategy, frozen=True, kw_only=True):
    """It updates once K minibatches of this version have come, from anyone; then all start on the new version."""

    spec: ClassVar[str] = "k-batch-sync"
    k: int


class Async(Strategy, frozen=True, kw_only=True):
    """It updates with every push; nobody waits for anybody."""

    spec: ClassVar[str] = "async"


class KAsync(Strategy, frozen=True, kw_only=True):
    """It updates once K workers have pushed, and those wait for it; the others go on, stale."""

    spec: ClassVar[str] = "k-async"
    k: int


class KBatchAsync(Strategy, frozen=True, kw_only=True):
    """It updates once K minibatches have come, of whatever version; nobody waits."""

    spec: ClassVar[str] = "k-batch-async"
    k: int


class Ssp(Strategy, frozen=True, kw_only=True):
    """As async, but nobody gets more than `s` steps ahead of the slowest."""

    spec: ClassVar[str] = "ssp"
    s: int


class Groups(Strategy, frozen=True, kw_only=True):
    """Workers in groups that agree by all-reduce, and push as one worker under the policy `between`."""

    spec: ClassVar[str] = "groups"
    size: int
    between: str = "async"
    staleness: int | None = None
    """A group's gradient that is older is dropped."""


class Adaptive(Strategy, frozen=True, kw_only=True):
    """A policy with a K, which grows from `start` as the loss falls."""

    spec: ClassVar[str] = "adaptive"
    of: str = "k-async"
    start: int = 1


class Auto(Strategy, frozen=True, kw_only=True):
    """A parameter server that watches `steps` steps of every worker, and then chooses its policy."""

    spec: ClassVar[str] = "auto"
    steps: int = 12


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2p")
SHARED_SCHEDULES = ("gpipe", "1f1b")
"""Those under which several workers may share a stage."""
NORMS = ("batch", "microbatch")


class Pipeline(Strategy, frozen=True, kw_only=True):
    """The model is cut between its layers; microbatches of every batch follow each other through the parts."""

    spec: ClassVar[str] = "pipeline"
    stages: int
    microbatches: int = 8
    schedule: str = "1f1b"
    chunks: int = 2
    """Of the model on each device, where the schedule is interleaved."""
    norm: str = "batch"
    """What batch norm layers take their statistics of; a `batch` is then not cut into microbatches."""
    replicas: str = ""
    """Workers of each stage, as in `1+2`: those of one stage share its microbatches. One each if not given."""

    def __post_init__(self) -> None:
        _split_checked(self, "stages", "microbatches", "chunks")
        _pipeline_checked(self, self.stages)
        _replicas_checked(self)

    @property
    def by_stage(self) -> tuple[int, ...]:
        """How many workers each stage has."""
        return tuple(map(int, self.replicas.split("+"))) if self.replicas else (1,) * self.stages

    @property
    def shared(self) -> bool:
        """Whether some stage has several workers."""
        return max(self.by_stage) > 1


class Tensor(Strategy, frozen=True, kw_only=True):
    """The model is cut inside its layers."""

    spec: ClassVar[str] = "tensor"
    degree: int

    def __post_init__(self) -> None:
        _split_checked(self, "degree")


class Mesh(Strategy, frozen=True, kw_only=True):
    """Replicas that are split themselves, and a data-parallel strategy between them."""

    spec: ClassVar[str] = "mesh"
    data: int
    pipeline: int = 1
    tensor: int = 1
    microbatches: int = 8
    schedule: str = "1f1b"
    chunks: int = 2
    norm: str = "batch"
    sync: str = "all-reduce"
    """Between replicas: all-reduce, or a parameter server under any policy."""

    def __post_init__(self) -> None:
        _split_checked(self, "data", "pipeline", "tensor", "microbatches", "chunks")
        _pipeline_checked(self, self.pipeline)
        if self.sync.partition(":")[0] != AllReduce.spec and isinstance(
            parse_strategy(self.sync), Pipeline | Tensor | Mesh
        ):
            raise UsageError(
                f"sync of strategy 'mesh' is '{self.sync}'; between replicas it must be 'all-reduce' or a policy of a "
                "parameter server, such as 'k-sync:k=1'"
            )


def _split_checked(strategy: Strategy, *names: str) -> None:
    for name in names:
        value = getattr(strategy, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(
                f"option '{name}' of strategy '{strategy.spec}' is {value!r}; it must be a whole number of at least 1"
            )


def _pipeline_checked(strategy: Pipeline | Mesh, stages: int) -> None:
    for name, allowed in (("schedule", SCHEDULES), ("norm", NORMS)):
        value = getattr(strategy, name)
        if value not in allowed:
            raise UsageError(
                f"option '{name}' of strategy '{strategy.spec}' is '{value}'; it must be {_listed(allowed)}"
            )
    if strategy.schedule == "interleaved" and strategy.microbatches % stages:
        raise UsageError(
            f"an interleaved pipeline of {stages} stages has {strategy.microbatches} microbatches; it must be a "
            "multiple of the stages"
        )


def _replicas_checked(pipeline: Pipeline) -> None:
    if not pipeline.replicas:
        return
    said = f"option 'replicas' of strategy 'pipeline' is {pipeline.replicas!r}"
    counts = str(pipeline.replicas).split("+")
    if len(counts) != pipeline.stages or not all(re.fullmatch("[1-9][0-9]{0,5}", count) for count in counts):
        example = "+".join(["1"] * (pipeline.stages - 1) + ["2"])
        raise UsageError(
            f"{said}; it must be how many workers each of the {pipeline.stages} stages has, at least 1, as in {example}"
        )
    most = max(pipeline.by_stage)
    if most > 1 and pipeline.schedule not in SHARED_SCHEDULES:
        raise UsageError(
            f"{said}, but under the schedule '{pipeline.schedule}' a stage has one worker; several share one under "
            f"{_listed(SHARED_SCHEDULES)}"
        )
    if most > pipeline.microbatches:
        raise UsageError(
            f"{said}, but {most} workers cannot share {pipeline.microbatches} microbatch"
            f"{'es' * (pipeline.microbatches > 1)}; write microbatches={most} or more"
        )


def workers_of(strategy: Strategy) -> int | None:
    """How many workers a strategy that splits the model needs; None where any number will do."""
    match strategy:
        case Pipeline():
            return sum(strategy.by_stage)
        case Tensor():
            return strategy.degree
        case Mesh():
            return strategy.data * strategy.pipeline * strategy.tensor
    return None


def between_replicas(strategy: Strategy, workers: int) -> tuple[Strategy, int]:
    """What a team does between its replicas, and how many there are of so many workers."""
    if isinstance(strategy, Mesh):
        return parse_strategy(strategy.sync), strategy.data
    return strategy, 1 if isinstance(strategy, Pipeline | Tensor) else workers


def check_workers(strategy: Strategy, workers: int) -> None:
    """Refuse a team of the wrong size for its strategy, with what would do."""
    needed = workers_of(strategy)
    if needed is None or needed == workers:
        return
    if isinstance(strategy, Pipeline) and strategy.shared:
        raise UsageError(
            f"'{strategy}' needs {needed} workers, as its replicas add up to that; this team has {workers}: start "
            f"{needed} workers, or write other replicas"
        )
    what = {"pipeline": "stages", "tensor": "degree"}.get(strategy.spec)
    advice = f"start {needed} workers"
    if what is not None and workers > 1:
        advice += f", or write {strategy.spec}:{what}={workers}"
    if what is not None and needed > 1 and workers % needed == 0:
        advice += f", or mesh:data={workers // needed},{strategy.spec}={needed}"
    raise UsageError(f"'{strategy}' needs {needed} workers, one for each part; this team has {workers}: {advice}")


STRATEGIES: dict[str, type[Strategy]] = {
    kind.spec: kind
    for kind in (
        AllReduce,
        Sync,
        KSync,
        KBatchSync,
        Async,
        KAsync,
        KBatchAsync,
        Ssp,
        Groups,
        Adaptive,
        Auto,
        Pipeline,
        Tensor,
        Mesh,
    )
}
"""A new strategy is one class here and one file in `strategies/` or `policies/`."""


def parse_strategy(spec: str | Strategy) -> Strategy:
    """`name` or `name:option=value,option=value` as a value, or one sentence about what is wrong with it."""
    strategy = spec if isinstance(spec, Strategy) else parse_spec(spec, STRATEGIES, "strategy")
    if isinstance(strategy, AllReduce) and strategy.topology not in TOPOLOGIES:
        raise UsageError(
            f"option 'topology' of strategy 'all-reduce' is '{strategy.topology}'; it must be {_listed(TOPOLOGIES)}"
        )
    return strategy


Spec = TypeVar("Spec", bound=msgspec.Struct)


def parse_spec(spec: str, kinds: dict[str, type[Spec]], what: str) -> Spec:
    """`name:option=value,…` as one of these kinds."""
    name, _, rest = spec.partition(":")
    kind = kinds.get(name)
    if kind is None:
        raise UsageError(f"unknown {what} '{name}'; there is {_listed(kinds)}")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        last = next(reversed(options), "")
        if key not in fields and ":" in options.get(last, ""):
            options[last] += f",{part}"  # of the spec that is this option's value
            continue
        if key not in fields:
            allowed = f"it takes {_listed(fields)}" if fields else "it takes no options"
            raise UsageError(f"{what} '{name}' has no option '{key}'; {allowed}")
        if not equals or not value:
            raise UsageError(f"option '{key}' of {what} '{name}' has no value; write {key}=VALUE")
        options[key] = value
    missing = [field.encode_name for field in fields.values() if field.required and field.encode_name not in options]
    if missing:
        raise UsageError(f"{what} '{name}' needs the option '{missing[0]}'; write {name}:{missing[0]}=NUMBER")
    for key, value in options.items():
        kind_of_value: Any = fields[key].type
        try:
            msgspec.convert(value, kind_of_value, strict=False)
        except msgspec.ValidationError:
            allowed = "a whole number" if kind_of_value in (int, int | None) else "a number"
            raise UsageError(f"option '{key}' of {what} '{name}' is '{value}'; it must be {allowed}") from None
    try:
        return msgspec.convert(options, kind, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):  # what the kind itself has to say about its options
            raise error.__cause__ from None
        raise


def _listed(names: Iterable[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


# -- gradients on their way to a server ------------------------------------------------------------------------------


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """What is done about a gradient that was computed on an older version."""


class RateOverStaleness(Correction, frozen=True, kw_only=True):
    """The learning rate is divided by the staleness."""


class DropAbove(Correction, frozen=True, kw_only=True):
    """A gradient that is older than this is dropped."""

    above: int


class DcAsgd(Correction, frozen=True, kw_only=True):
    """The gradient is extrapolated to the newest version."""

    strength: float = msgspec.field(default=0.04, name="lambda")


class DcAsgdAdaptive(Correction, frozen=True, kw_only=True):
    """As DC-ASGD, the less the larger the gradients have been."""

    strength: float = msgspec.field(default=2.0, name="lambda")
    mean: float = 0.95


class DuttaRate(Correction, frozen=True, kw_only=True):
    """The learning rate is `c` over the squared distance to the gradient's version, but at most `max`."""

    c: float
    max: float | None = None
    """The learning rate itself, if not given."""


CORRECTIONS: dict[str, type[Correction]] = {
    "lr/staleness": RateOverStaleness,
    "drop": DropAbove,
    "dc-asgd": DcAsgd,
    "dc-asgd-adaptive": DcAsgdAdaptive,
    "distance": DuttaRate,
}


def parse_correction(spec: str) -> Correction:
    """`lr/staleness`, `drop:above=8`, `dc-asgd:lambda=0.04`, `dc-asgd-adaptive`, `distance:c=0.1,max=0.05`."""
    correction = parse_spec(spec, CORRECTIONS, "correction")
    if isinstance(correction, DropAbove) and correction.above < 0:
        raise UsageError(f"correction '{spec}': above is {correction.above}; it must be a number of updates, 0 or more")
    if isinstance(correction, DuttaRate) and not (correction.c > 0 and (correction.max is None or correction.max > 0)):
        raise UsageError(f"correction '{spec}': c and max must be above 0")
    if isinstance(correction, DcAsgd | DcAsgdAdaptive) and not math.isfinite(correction.strength):
        raise UsageError(f"correction '{spec}': lambda is {correction.strength:g}; it must be finite")
    if isinstance(correction, DcAsgdAdaptive) and not 0 <= correction.mean < 1:
        raise UsageError(f"correction '{spec}': mean is {correction.mean:g}; it must be from 0 to below 1")
    return correction


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """What a pushed gradient is written as."""

    form: str = "none"
    share: float = 0.01
    """Of the elements that top-k keeps."""


FORMS = ("none", "fp32", "bf16", "fp16", "int8", "topk")


def parse_compression(spec: str) -> Compression:
    """`none`, `bf16`, `fp16`, `int8`, `topk` or `topk:SHARE`."""
    form, _, share = spec.partition(":")
    if form not in FORMS or (share and form != "topk"):
        raise UsageError(f"compress is '{spec}'; it must be {_listed(FORMS)}, or 'topk:SHARE'")
    if not share:
        return Compression(form=form)
    if not _FACTOR.match(share) or not 0 < float(share) <= 1:
        raise UsageError(f"compress is '{spec}'; the share of the elements to keep must be above 0 and at most 1")
    return Compression(form=form, share=float(share))


def parse_servers(text: str) -> int | str:
    """`lead`, `all`, `each`, `MACHINE:COUNT,…`, or how many server processes."""
    if text in ("lead", "all", "each") or _BY_MACHINE.match(text):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"servers is '{text}'; it must be a number of processes, at least 1, or 'lead' or 'all', "
            "or over machines 'each', or MACHINE:COUNT,… as in 0:1,2:1"
        )
    return int(text)


_BY_MACHINE = re.compile(r"^\d+:[1-9]\d*(,\d+:[1-9]\d*)*$")


def place_servers(text: str, machines: list[list[int]]) -> list[int]:
    """Which machine each server is on; the first is always on the first machine, where rank 0 is."""
    where = parse_servers(text)
    if where == "all":
        machine_of = {rank: number for number, ranks in enumerate(machines) for rank in ranks}
        return [machine_of[rank] for rank in sorted(machine_of)]
    if where == "each":
        return list(range(len(machines)))
    if isinstance(where, int) or where == "lead":
        return [0] * (1 if where == "lead" else int(where))
    placed: list[int] = []
    for part in where.split(","):
        machine, count = map(int, part.split(":"))
        placed += [machine] * count
    if 0 not in placed or max(placed) >= len(machines):
        raise UsageError(
            f"servers is '{text}'; there are machines 0 to {len(machines) - 1}, and one server must be on machine 0"
        )
    return sorted(placed)


# -- slowness on purpose ---------------------------------------------------------------------------------------------

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_FACTOR = re.compile(rf"^{_NUMBER}$")
_EXPONENTIAL = re.compile(rf"^(?:(?P<shift>{_NUMBER})\+)?exp\((?P<mean>{_NUMBER})\)$")
_PARETO = re.compile(rf"^pareto\((?P<least>{_NUMBER}),(?P<shape>{_NUMBER})\)$")


class Slowness(msgspec.Struct, frozen=True, kw_only=True):
    """How slow a worker is made: a factor on its computing, or a drawn length of each step."""

    factor: float = 1.0
    """Its computing takes this many times as long."""
    shift: float = 0.0
    """Seconds that every drawn step lasts at least."""
    mean: float = 0.0
    """Mean of the exponential part of a drawn step, in seconds."""
    least: float = 0.0
    """Smallest value of a Pareto-distributed step, in seconds."""
    shape: float = 0.0
    """Shape of that distribution: the smaller, the heavier its tail."""
    where: str = "computing"
    """What of a step it is that takes so long: `computing` as a whole, `loading`, `forward`, `backward`, or `link`."""

    def seconds(self, computing: float, source: random.Random) -> float:
        """How long a step should last that took `computing` seconds; never less than that."""
        drawn = self.shift
        if self.mean:
            drawn += source.expovariate(1 / self.mean)
        if self.least:
            drawn += self.least * source.paretovariate(self.shape)
        return max(computing * self.factor, drawn)


def parse_slowness(specs: Iterable[str], workers: int, room: int = 0) -> dict[int, Slowness]:
    """`1:4`, `all:exp(0.1)`, `all:0.05+exp(0.05)`, `2:pareto(0.02,2.5)`, `1:3@backward` by rank; a later one wins.

    room: how many workers there may be later; `all` is for those, too.
    """
    slow: dict[int, Slowness] = {}
    for spec in specs:
        who, _, what = spec.replace(" ", "").partition(":")
        if who == "all":
            ranks: Iterable[int] = range(max(workers, room))
        elif who.isdecimal() and int(who) < workers:
            ranks = [int(who)]
        else:
            raise UsageError(f"--slow '{spec}': '{who}' is not a rank from 0 to {workers - 1}, nor 'all'")
        for rank in ranks:
            slow[rank] = _slowness(spec, what)
    return slow


_WHERE = ("computing", "loading", "forward", "backward", "link")


def _slowness(spec: str, what: str) -> Slowness:
    what, at, where = what.partition("@")
    if at and where not in _WHERE:
        raise UsageError(f"--slow '{spec}': '{where}' is not a part of a step; there are {', '.join(_WHERE)}")
    where = where or _WHERE[0]
    if _FACTOR.match(what) and 1 <= float(what) < math.inf:
        return Slowness(factor=float(what), where=where)
    if (match := _EXPONENTIAL.match(what)) and 0 < float(match["mean"]) < math.inf:
        return Slowness(shift=float(match["shift"] or 0), mean=float(match["mean"]), where=where)
    if (match := _PARETO.match(what)) and float(match["least"]) > 0 and float(match["shape"]) > 0:
        return Slowness(least=float(match["least"]), shape=float(match["shape"]), where=where)
    raise UsageError(
        f"--slow '{spec}': '{what}' is neither a factor of at least 1, exp(MEAN), SHIFT+exp(MEAN) "
        "nor pareto(LEAST,SHAPE), in seconds"
    )


# -- what a launcher hands to its workers ----------------------------------------------------------------------------


class Profiling(msgspec.Struct, frozen=True, kw_only=True):
    """That a script is to be run only until its model is known, and what each of its operations costs."""

    path: str
    """Where to write it."""
    microbatches: int
    norm: str = "batch"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline run` tells each worker, in one environment variable."""

    VARIABLE: ClassVar[str] = "PACELINE_LAUNCH"

    strategy: str | None = None
    """The strategy asked for on the command line; it wins over the script's."""
    timeouts: Timeouts = Timeouts()
    slow: dict[int, Slowness] = {}
    seed: int = 0
    """Seeds the slowness that is drawn."""
    folder: str | None = None
    """Where the run leaves its events, checkpoints and summary."""
    name: str | None = None
    """Of the folder under `runs/`, where the workers make it themselves; it wins over the script's."""
    record: bool = True
    """Whether events are recorded."""
    control: int | None = None
    """Descriptor of the shared memory in which the workers meet."""
    starter: int | None = None
    """Descriptor of the socket at which the launcher is asked to start servers."""
    servers: str | None = None
    """Where the parameters are held: how many processes, or `lead`, or `all`."""
    corrections: list[str] = []
    compress: str | None = None
    key: str | None = None
    """The secret of this run, which whoever is not of its machines does not know."""
    elastic: bool = False
    """Whether the run goes on, under any strategy, when a worker is lost."""
    joins: str | None = None
    """This worker joins a run that goes on already: the address of its server, or of its machine's relay."""
    machine: int = 0
    """The number of the machine on which it joins."""
    profiling: Profiling | None = None

    def to_environment(self) -> dict[str, str]:
        return {self.VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls) -> Launch:
        text = os.environ.get(cls.VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else cls()


def capacity(workers: int) -> int:
    """How many workers a run has room for that begins with so many. Memory is taken when it is used, not before."""
    return max(2 * workers, workers + 4)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where this process stands in its team, as torchrun says it in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Place:
        def number(name: str, default: int) -> int:
            value = os.environ.get(name, str(default))
            if not value.isdecimal():
                raise UsageError(f"{name} is '{value}' in the environment; it must be a whole number")
            return int(value)

        world_size = number("WORLD_SIZE", 1)
        rank = number("RANK", 0)
        place = cls(
            rank=rank,
            local_rank=number("LOCAL_RANK", rank),
            world_size=world_size,
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        )
        if not (world_size >= 1 and rank < world_size):
            raise UsageError(f"RANK is {rank} and WORLD_SIZE {world_size}; RANK must be below WORLD_SIZE")
        return place


T = TypeVar("T")


def one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """`value`, if it is allowed; else one sentence."""
    choices = list(allowed)
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value


def positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or not math.isfinite(value):
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value
